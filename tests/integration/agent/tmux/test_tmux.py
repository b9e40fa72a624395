"""The tool `tmux` in real slots: full-screen programs, REPLs, captures, the size of the pane, and the recording."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.link.errors import PathNotFound
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.tmux.tmux_harness import Terminal, replay, text_of


async def test_vim_edits_a_file(harness: AgentHarness) -> None:
    terminal = Terminal(harness)
    await harness.bash("printf 'one\\ntwo\\n' > notes.txt")

    opened = await terminal.type("vim -u NONE notes.txt", "Enter")
    assert opened.text.startswith("one\ntwo\n~\n")
    assert opened.metadata["alternate_screen"] is True
    closed = await terminal.type("G", "o", "three: é", "Escape", ":wq", "Enter")

    assert (await harness.bash("cat notes.txt")).text == "one\ntwo\nthree: é\n"
    assert closed.metadata["alternate_screen"] is False
    assert closed.metadata["terminal"] == "running"


async def test_a_pager_and_a_repl_settle_when_they_wait_for_keys(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    await terminal.act("reset", pane_width=60, pane_height=10)

    assert (await terminal.type("seq 100 | less", "Enter")).text == "".join(f"{number}\n" for number in range(1, 10)) + ":\n"
    assert (await terminal.type("Space")).text.startswith("10\n11\n")
    await terminal.type("q")
    assert ">>>" in (await terminal.type("/usr/bin/python3 -q", "Enter")).text
    added = await terminal.type("6 * 7", "Enter", capture_incremental=True)
    assert (added.metadata["captured"], added.text) == ("incremental", ">>> 6 * 7\n42\n>>>\n")
    asked = await terminal.type("input('name? ')", "Enter", max_wait_s=20)
    assert asked.text.endswith("name?\n")


async def test_a_blocking_send_waits_for_the_command_and_gives_up_in_time(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    done = await terminal.type("sleep 1.5; echo do''ne", "Enter")
    assert "done" in done.text

    waiting = await terminal.act("send_keys", keys=["sleep 600", "Enter"], block=True, max_wait_s=1.5)
    assert waiting.metadata["settled"] is False
    # Without keys: a cursor behind some text that stays as it is looks like a prompt.
    short = await bwrap.call("tmux", args={"action": "send_keys", "keys": "", "block": True}, timeout_s=4)
    assert (short.reason, short.metadata["settled"]) == ("exit", False), "it returns the screen before its own timeout"

    assert (await terminal.type("C-c")).text.rstrip().endswith("$")


async def test_the_deadlines_hold_while_another_call_uses_the_terminal(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    await terminal.type("echo begun", "Enter")
    args = {"action": "send_keys", "keys": ["sleep 601", "Enter"], "block": True}
    using = asyncio.create_task(bwrap.call("tmux", call_id="using", args=args, timeout_s=300))
    await bwrap.until("pgrep -x sleep")

    for limit in ("timeout", "no_output_timeout"):
        late = await bwrap.call("tmux", args={"action": "capture"}, **{limit + "_s": 0.3})
        assert late.reason == limit, late.meta

    await bwrap.ask("cancel", call_id="using")
    assert (await using).reason == "cancelled"
    assert (await terminal.type("C-c")).text.rstrip().endswith("$")


async def test_captures_are_of_the_screen_of_what_is_new_or_of_everything(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    await terminal.act("reset", pane_width=40, pane_height=5)
    await terminal.type("PS1='> '; clear", "Enter")
    screen = await terminal.type("seq 12", "Enter")
    assert screen.text == "9\n10\n11\n12\n>\n"
    assert screen.metadata["cursor"] == {"x": 2, "y": 4}

    new = await terminal.type("seq 3", "Enter", capture_incremental=True)
    assert new.text == "> seq 3\n1\n2\n3\n>\n"
    assert (await terminal.act("capture", capture_incremental=True)).text == ">\n"
    entire = await terminal.act("capture", capture_entire=True)
    assert entire.text.endswith("> seq 12\n" + "".join(f"{number}\n" for number in range(1, 13)) + "> seq 3\n1\n2\n3\n>\n")
    assert (entire.metadata["captured"], entire.metadata["terminal"]) == ("entire", "running")


async def test_a_program_learns_of_a_new_size(harness: AgentHarness) -> None:
    terminal = Terminal(harness)
    assert "40 160\n" in (await terminal.type("stty size", "Enter")).text

    resized = await terminal.act("resize", pane_width=72, pane_height=12)

    assert (resized.metadata["pane_width"], resized.metadata["pane_height"]) == (72, 12)
    assert "12 72\n" in (await terminal.type("stty size", "Enter")).text
    captured = await terminal.act("capture", pane_width=70, block=True)
    assert (captured.metadata["pane_width"], captured.metadata["pane_height"], captured.metadata["settled"]) == (70, 12, True)


async def test_a_recording_replays_to_the_screen_that_was_captured(harness: AgentHarness) -> None:
    terminal = Terminal(harness)
    await terminal.act("reset", pane_width=50, pane_height=12)
    await terminal.type("PS1='> '; clear", "Enter")
    await terminal.type("printf '日本語 e\\u0301 \\U1F600 \\033[31mred\\033[0m\\n'", "Enter")
    await harness.bash("seq 40 > numbers.txt")
    await terminal.type("vim -u NONE numbers.txt", "Enter")
    captured = await terminal.type("10G", "i", "→ here", "Escape", "C-d")

    header, events = await terminal.recording()

    assert (header["version"], header["width"], header["height"]) == (2, 50, 12)
    assert [time for time, _, _ in events] == sorted(time for time, _, _ in events)
    assert text_of(replay(header, events)) == captured.text
    assert any("日本語 e\u0301 \U0001f600 " in text for _, _, text in events)


async def test_bytes_that_are_no_text_do_not_break_a_recording(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    every_high_byte = "python3 -c 'import sys; sys.stdout.buffer.write(bytes(range(128, 256)) * 30)'"
    await terminal.type("printf 'a\\xffb\\0c\\n'; " + every_high_byte + "; clear; printf 'en''d\\n'", "Enter")
    await terminal.until_shown("end")

    _, events = await terminal.recording()

    assert any("a\ufffdb\0c" in text for _, _, text in events)


async def test_a_slot_without_a_terminal_has_no_recording(bwrap: AgentHarness) -> None:
    for name in ("terminal.cast", "0", "../0"):
        with pytest.raises(PathNotFound, match="has no recording"):
            await bwrap.data("recording", "1", name=name)


async def test_keys_are_sent_once_however_often_a_call_is_sent(bwrap: AgentHarness) -> None:
    args = {"action": "send_keys", "keys": ["echo again >> log.txt", "Enter"], "block": True}
    first, second = [await bwrap.call("tmux", call_id="k", args=args) for _ in range(2)]

    assert first.text == second.text
    assert (await bwrap.bash("cat log.txt")).text == "again\n"


async def test_a_cancelled_call_leaves_the_terminal_as_it_is(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    await terminal.type("echo be''fore", "Enter")
    args = {"action": "send_keys", "keys": ["cat", "Enter"], "block": True}
    waiting = asyncio.create_task(bwrap.call("tmux", call_id="w", args=args))
    await bwrap.until("pgrep -x cat >/dev/null")

    assert (await bwrap.ask("cancel", call_id="w"))["found"] is True
    assert (await waiting).reason == "cancelled"

    after = await terminal.until_shown("before")
    assert after.metadata["terminal"] == "running"
    assert (await bwrap.bash("pgrep -x cat")).code == 0

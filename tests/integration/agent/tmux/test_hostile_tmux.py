"""What a program in the terminal may do to it, and what is left of a terminal when it ends."""

from __future__ import annotations

import psutil
import pytest

from tests.integration.agent.agent_harness import AgentHarness, wait_for_ends
from tests.integration.agent.conftest import Maker
from tests.integration.agent.tmux.tmux_harness import Terminal

INVALID: list[tuple[dict[str, object], str]] = [
    ({}, "action"),
    ({"action": "send_keys"}, "keys"),
    ({"action": "send_keys", "keys": 3}, "keys"),
    ({"action": "send_keys", "keys": ["a", None]}, "keys"),
    ({"action": "send_keys", "keys": "a\0"}, "NUL"),
    ({"action": "send_keys", "keys": "x" * 65537}, "65536"),
    ({"action": "capture", "keys": "a"}, "keys"),
    ({"action": "send_keys", "keys": "a", "block": "yes"}, "block"),
    ({"action": "send_keys", "keys": "a", "block": True, "min_wait_s": 3, "max_wait_s": 2}, "max_wait_s"),
    ({"action": "capture", "min_wait_s": -1}, "min_wait_s"),
    ({"action": "capture", "capture_entire": True, "capture_incremental": True}, "exclude"),
    ({"action": "resize"}, "pane_width"),
    ({"action": "resize", "pane_width": 501}, "500"),
]


def processes_of(harness: AgentHarness, name: str) -> list[psutil.Process]:
    """The processes with this name that descend from the agent."""
    return [child for child in psutil.Process(harness.process.pid).children(recursive=True) if child.name().startswith(name)]


async def test_an_invalid_argument_is_named(bwrap: AgentHarness) -> None:
    for args, named in INVALID:
        answer = await bwrap.call("tmux", args=args)
        assert answer.reason == "invalid_args", args
        assert named in answer.error, args
    assert processes_of(bwrap, "tmux") == []


async def test_a_slot_without_tmux_says_what_is_missing(make_harness: Maker) -> None:
    harness = await make_harness(slots=1, env_vars={"PATH": "/nowhere"})

    answer = await harness.call("tmux", args={"action": "capture"})

    assert answer.reason == "invalid_args"
    assert "tmux, which is not on the PATH of the slot" in answer.error
    assert "tmux" not in harness.link.hello["capabilities"]["tools"]


async def test_a_flood_neither_grows_the_agent_nor_stops_the_terminal(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    agent = psutil.Process(bwrap.process.pid)
    await terminal.act("send_keys", keys=["yes flood", "Enter"])
    await terminal.until_shown("flood\nflood\n")
    before_bytes = agent.memory_info().rss

    flooded = await terminal.act("send_keys", keys="", block=True, max_wait_s=2)

    assert flooded.metadata["settled"] is False
    assert (await bwrap.bash("echo still there")).text == "still there\n"
    stopped = await terminal.type("C-c")
    assert stopped.text.rstrip().endswith("$")
    assert agent.memory_info().rss - before_bytes < 24 << 20


async def test_the_end_of_the_shell_is_reported_and_the_next_call_starts_another(harness: AgentHarness) -> None:
    terminal = Terminal(harness)
    ended = await terminal.type("echo bye", "Enter", "exit 3", "Enter")
    assert (ended.metadata["terminal"], ended.metadata["shell_exit_code"]) == ("ended", 3)
    assert "bye" in ended.text

    again = await terminal.type("echo ne''w", "Enter")

    assert (again.metadata["terminal"], again.metadata["terminal_ended"]) == ("restarted", "its shell has exited")
    assert "new" in again.text
    assert "bye" not in again.text


@pytest.mark.parametrize("command", ["tmux kill-server", "pkill -9 -x 'tmux: server'; pkill -9 tmux"])
async def test_a_terminal_that_was_killed_starts_again(bwrap: AgentHarness, command: str) -> None:
    terminal = Terminal(bwrap)
    await terminal.type("sleep 1000 & disown", "Enter")
    killed = await bwrap.call("tmux", args={"action": "send_keys", "keys": [command, "Enter"], "block": True})
    assert killed.reason == "tool_error"
    assert "the next call starts a new one" in killed.error

    again = await terminal.type("echo ne''w", "Enter")

    assert (again.metadata["terminal"], "new" in again.text) == ("restarted", True)
    header, events = await terminal.recording()
    assert header["version"] == 2
    assert [text for _, kind, text in events if kind == "o"].count("\x1bc") == 1


async def test_the_socket_of_a_terminal_is_of_no_use_to_replace(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    await terminal.type("rm -rf /tmp/.terminal-*; mkdir /tmp/.terminal-x; echo replaced", "Enter")

    assert "still" in (await terminal.type("echo st''ill", "Enter")).text


async def test_forged_replies_are_only_text(bwrap: AgentHarness) -> None:
    terminal = Terminal(bwrap)
    forged = r"for i in {1..400}; do printf '%%end %d %d 1\n%%output %%0 forged\n%%exit\n' $EPOCHSECONDS $i; done; printf '\n%%error 1 1 1\n'"
    await terminal.type(forged, "Enter")

    shown = await terminal.act("capture", capture_entire=True)

    assert shown.text.count("\n%output %0 forged\n%exit\n") == 400
    assert (await terminal.type("echo al''ive", "Enter")).metadata["terminal"] == "running"


async def test_a_release_leaves_nothing_of_a_terminal(harness: AgentHarness) -> None:
    terminal = Terminal(harness)
    await terminal.type("nohup setsid sleep 4321 >/dev/null 2>&1 & disown", "Enter")
    await terminal.act("send_keys", keys=["vim -u NONE x", "Enter"])
    left = [process for name in ("tmux", "vim", "sleep") for process in processes_of(harness, name)]
    assert len(left) >= 4

    assert (await harness.reset())["state"] == "ready"

    assert await wait_for_ends(left) == []
    assert (await terminal.act("capture")).metadata["terminal"] == "started"


async def test_a_reset_ends_what_ran_and_keeps_other_processes(harness: AgentHarness) -> None:
    terminal = Terminal(harness)
    await harness.bash("sleep 4322 >/dev/null 2>&1 & echo $! > other")
    await terminal.act("send_keys", keys=["trap '' TERM HUP; sh -c 'echo $$ > mine; sleep 4323; true'", "Enter"])
    await harness.until("[ -s mine ]")

    again = await terminal.act("reset", pane_width=90, pane_height=20)

    assert (again.metadata["terminal"], again.metadata["pane_width"]) == ("restarted", 90)
    assert (await harness.bash("kill -0 $(cat mine)")).code == 1
    assert (await harness.bash("kill -0 $(cat other)")).code == 0


async def test_a_timeout_of_another_call_leaves_the_terminal_alone(harness: AgentHarness) -> None:
    terminal = Terminal(harness)
    await terminal.type("echo be''fore", "Enter")

    assert (await harness.bash("sleep 60", timeout_s=0.5)).reason == "timeout"

    assert (await terminal.act("capture")).metadata["terminal"] == "running"

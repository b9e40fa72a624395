"""Sessions: what stays in the shell between calls, how its commands end, and what becomes of the shell then."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import pytest

from sandbox_server.agent.execution.sessions.lease_sessions import MAX_SESSIONS
from sandbox_server.core.execution import Fault, Reason
from sandbox_server.core.fault import fault_of_result
from tests.integration.agent.agent_harness import AgentHarness, Answer
from tests.integration.agent.conftest import Maker


class Session:
    """A session of a slot, with a name of its own, because other tests use the same slot."""

    def __init__(self, harness: AgentHarness, slot: str = "0", name: str | None = None) -> None:
        self.harness = harness
        self.slot = slot
        self.name = name or secrets.token_hex(4)

    async def run(self, command: str, **fields: Any) -> Answer:
        return await self.harness.call("bash_stateful", self.slot, args={"command": command, "session": self.name}, **fields)

    async def kept(self, command: str, **fields: Any) -> str:
        """Run a command that must succeed in the shell of the earlier ones. Returns its output."""
        answer = await self.run(command, **fields)
        assert (answer.reason, answer.code, answer.metadata["session"]) == ("exit", 0, "kept"), (answer.meta, answer.text)
        return answer.text


async def test_the_state_of_a_shell_stays(harnesses: list[AgentHarness]) -> None:
    for harness in harnesses:
        session = Session(harness)
        await session.kept("mkdir -p sub; cd sub; x=5; export y=6; declare -A m; m[a]=7; f() { echo f $x $y ${m[a]}; }; set -- p q; exec 7>kept")
        assert await session.kept("basename $PWD; f; echo $# $2; echo to-7 >&7; cat kept") == "sub\nf 5 6 7\n2 q\nto-7\n"
        assert (await session.run("false")).code == 1
        assert await session.kept("echo $?") == "1\n"
        assert await session.kept("sleep 1000 & echo begun") == "begun\n"
        assert await session.kept("kill %1; wait %1; echo $?") == "143\n"
        other = await Session(harness).run("echo x=$x")
        assert (other.text, other.metadata["session"]) == ("x=\n", "kept")
        default = await harness.call("terminal_stateful", args={"command": "z=8"})
        assert default.metadata["session"] == "kept"
        assert (await harness.call("bash_stateful", args={"command": "echo $z"})).text == "8\n"


CASES = [
    ("cat <<E\nheredoc $((1+1))\nE", 0, "heredoc 2\n", "kept"),
    ("read line; echo read $?", 0, "read 1\n", "kept"),
    ("read -p 'Continue? ' line; cat; echo next", 0, "next\n", "kept"),
    ("echo 'unbalanced", 2, None, "kept"),
    ("echo before\nif true", 2, None, "kept"),
    ("echo $(", 2, None, "kept"),
    ("echo `", 2, None, "kept"),
    ("cat <(", 2, None, "kept"),
    (")", 2, None, "kept"),
    ("echo $((1/0)); echo next", 1, None, "kept"),
    ("set -u; echo $unset; echo next", 1, None, "kept"),
    ("set +u; return 4", 4, "", "kept"),
    ("exec no-such-program; echo next", 0, None, "kept"),
    ("PS1='prompt> '; PROMPT_COMMAND='echo prompting'", 0, "", "kept"),
    ("echo no prompt", 0, "no prompt\n", "kept"),
    ("exec > redirected; echo to-file", 0, "", "kept"),
    ("cat redirected", 0, "to-file\n", "kept"),
    ("break; continue; true", 0, None, "kept"),
    ("sleep 0 & wait; echo no job numbers", 0, "no job numbers\n", "kept"),
    ("kill 0; echo survives", 0, "survives\n", "kept"),
    ("(exit 7)", 7, "", "kept"),
    ("bash -c 'kill -9 $$'", 137, None, "kept"),
    ("alias greet='echo hello'", 0, "", "kept"),
    ("greet; printf 'no newline'", 0, "hello\nno newline", "kept"),
    ("exit 3", 3, "", "restarted"),
    ("set -e; false; echo next", 1, "", "restarted"),
    ("exec bash -c 'echo replaced; exit 5'", 5, "replaced\n", "restarted"),
    ("kill -9 $$; echo next", 137, "", "restarted"),
    ("trap 'echo bye' EXIT; exit", 0, "bye\n", "restarted"),
]


async def test_every_way_in_which_a_command_ends_is_defined(harnesses: list[AgentHarness]) -> None:
    for harness in harnesses:
        session = Session(harness)
        await session.kept("true")
        for command, code, output, state in CASES:
            answer = await session.run(command)
            assert (answer.reason, answer.code, answer.metadata["session"]) == ("exit", code, state), (command, answer.meta, answer.text)
            assert output is None or answer.text == output, (command, answer.text)
            assert "next" not in answer.text or "echo next" not in command or code == 0, (command, answer.text)
            if state == "restarted":
                assert "new shell" in answer.metadata["session_reason"]
                after = await session.run("echo in $$")
                assert (after.code, after.metadata["session"]) == (0, "restarted")
                assert after.metadata["session_reason"].startswith("before this command, the shell of the session ended"), after.metadata
                await session.kept("true")


async def test_nothing_of_a_command_with_a_syntax_error_runs(harness: AgentHarness) -> None:
    session = Session(harness)
    for command in ("echo run\nif true", "echo run; echo $(", "echo run; 'x", "echo run `"):
        answer = await session.run(command)
        assert (answer.code, answer.metadata["session"]) == (2, "kept")
        assert "run\n" not in answer.text, command
        assert "line" in answer.text, (command, answer.text)
    for _ in range(20):  # a damaged heap shows itself later
        await session.kept("x=$(seq 200 | wc -l); y=({1..300}); [ $x = 200 ]")
    await session.kept("shopt -s extglob")
    await session.kept("touch a1 b1\necho !(a*|kept) > /dev/null")  # needs extglob, and is checked first


async def test_output_is_complete_and_exact(harness: AgentHarness) -> None:
    session = Session(harness)
    large = await session.run("head -c 3000000 /dev/zero | tr '\\0' x; echo end", output_limit_bytes=4_000_000)
    assert len(large.body) == 3_000_004
    assert large.text.endswith("xend\n")
    two = await session.run("echo out; echo err >&2", separate_streams=True)
    assert (two.meta["lens"], two.body) == ([4, 4], b"out\nerr\n")
    assert (await session.run("echo out; echo err >&2; echo out")).text == "out\nerr\nout\n"
    assert (await session.run(r"printf '\xff\x00\xfe'")).body == b"\xff\x00\xfe"
    long = "x" * 900_000
    assert await session.kept(f"v='{long}'; echo ${{#v}}") == "900000\n"


async def test_what_background_jobs_write_between_calls_is_in_the_next_call(harness: AgentHarness) -> None:
    session = Session(harness)
    await session.kept("(until [ -e go ]; do sleep 0.01; done; echo from the job; seq 100000; touch done) &")
    await harness.bash("touch go")
    await harness.until("[ -e done ]")
    text = await session.kept("echo next")
    assert text.endswith("99999\n100000\nnext\n")
    assert "bytes cut" in text
    assert len(text) < 70_000


INTERRUPTED = [
    "sleep 1000; echo rest",
    "sleep 1000 | cat; echo rest",
    "(sleep 1000; echo rest); echo rest",
    "x=$(sleep 1000); echo rest",
    "f() { sleep 1000; echo rest; }; f; echo rest",
    "while :; do sleep 1000; done; echo rest",
    "while :; do :; done; echo rest",
    "sleep 1000 & wait; echo rest",
    "bash -c 'sleep 1000; echo rest'; echo rest",
    "setsid -w sleep 1000; echo rest",
]


async def test_a_timeout_interrupts_the_command_and_keeps_the_session(harnesses: list[AgentHarness]) -> None:
    async def interrupt(harness: AgentHarness) -> None:
        session = Session(harness)
        await session.kept("state=5; sleep 1000 & echo $! > earlier")
        for command in INTERRUPTED:
            answer = await session.run("echo begun; " + command, timeout_s=0.5)
            assert (answer.reason, answer.code, answer.metadata["session"]) == ("timeout", None, "kept"), (command, answer.meta)
            assert answer.text == "begun\n", (command, answer.text)
            assert "interrupted; the shell of its session goes on" in answer.error
        assert await session.kept("kill -0 $(cat earlier) && echo $state") == "5\n"
        silent = await session.run("echo begun; sleep 1000", no_output_timeout_s=0.3)
        assert (silent.reason, silent.metadata["session"]) == ("no_output_timeout", "kept")
        assert await session.kept("jobs -r | wc -l; kill $(cat earlier)") == "1\n"

    await asyncio.gather(*(interrupt(harness) for harness in harnesses))  # side by side, because each of them waits for the timeouts


async def test_what_ignores_the_interrupt_is_killed(harness: AgentHarness) -> None:
    session = Session(harness)
    await session.kept("x=5")
    marker = f"1000.{secrets.randbelow(10**9)}"  # in the mode `none`, a slot sees the processes of other slots
    stubborn = await session.run(f"""bash -c "trap '' INT TERM; sleep {marker}1 & while sleep {marker}2; do :; done"; echo rest""", timeout_s=0.5)
    assert (stubborn.reason, stubborn.metadata["session"], stubborn.metadata["evidence"]["signal"]) == ("timeout", "kept", "SIGKILL"), stubborn.meta
    assert await session.kept("echo $x") == "5\n"
    stopped = await session.run("kill -STOP $$; echo rest", timeout_s=0.5)
    assert (stopped.reason, stopped.metadata["session"], stopped.text) == ("timeout", "restarted", ""), stopped.meta
    assert "did not react" in stopped.metadata["session_reason"]
    after = await session.run("echo x=$x")
    assert (after.text, after.metadata["session"]) == ("x=\n", "restarted")
    assert (await harness.bash(f"pgrep -x sleep -a | grep -c '{marker}'")).text == "0\n"


async def test_a_call_can_be_cancelled(harness: AgentHarness) -> None:
    session = Session(harness)
    await session.kept("x=5")
    call_id = secrets.token_hex(4)
    running = asyncio.create_task(session.run("touch begun; sleep 1000; echo rest", call_id=call_id))
    await harness.until("[ -e begun ]")
    waiting_id = secrets.token_hex(4)
    waiting = asyncio.create_task(session.run("touch never", call_id=waiting_id))
    for limit in ("timeout", "no_output_timeout"):
        late = await session.run("touch never", **{limit + "_s": 0.2})
        assert late.reason == limit
        assert late.error.endswith("did not run"), late.meta
        assert late.metadata["evidence"]["ran"] is False
        assert late.metadata["may_have_run"] is False
        assert fault_of_result(Reason(limit), late.metadata) is Fault.AMBIGUOUS
    await harness.ask("cancel", call_id=waiting_id)
    assert (await waiting).reason == "cancelled"
    await harness.ask("cancel", call_id=call_id)
    answer = await running
    assert (answer.reason, answer.metadata["session"], answer.text) == ("cancelled", "kept", "")
    assert await session.kept("echo $x; [ ! -e never ]") == "5\n"


async def test_the_end_of_a_shell_leaves_the_background_processes_of_other_calls_alone(harness: AgentHarness) -> None:
    session = Session(harness)
    await session.kept("true")
    await harness.bash("(setsid bash -c 'echo $$ > daemon; exec sleep 1000' > /dev/null 2>&1 < /dev/null &); until [ -s daemon ]; do sleep 0.01; done")
    killed = await session.run("kill -STOP $$", timeout_s=0.3)

    assert killed.metadata["evidence"]["signal"] == "SIGKILL"
    assert (await harness.bash("kill -0 $(cat daemon) && echo lives")).text == "lives\n"


async def test_calls_of_one_session_run_in_order_and_each_once(harness: AgentHarness) -> None:
    session = Session(harness)
    answers = await asyncio.gather(*[session.run(f"echo {number} >> order; echo {number}") for number in range(20)])
    assert sorted(answer.text for answer in answers) == sorted(f"{number}\n" for number in range(20))
    assert (await session.kept("wc -l < order; sort -u order | wc -l")) == "20\n20\n"
    specs = [await session.run("echo ran >> once; echo it", call_id="the-same") for _ in range(3)]
    assert [answer.text for answer in specs] == ["it\n"] * 3
    assert await session.kept("cat once") == "ran\n"


async def test_as_many_sessions_as_the_limit_says_and_no_more(make_harness: Maker) -> None:
    harness = await make_harness(slots=1)
    sessions = [Session(harness, name=f"s{number}") for number in range(MAX_SESSIONS)]
    await asyncio.gather(*[session.kept(f"x={number}") for number, session in enumerate(sessions)])
    assert await asyncio.gather(*[session.kept("echo $x") for session in sessions]) == [f"{number}\n" for number in range(MAX_SESSIONS)]
    refused = await Session(harness, name="one-more").run("true")
    assert refused.reason == "tool_error"
    assert f"at most {MAX_SESSIONS}" in refused.error
    assert (await sessions[0].run("exit")).code == 0
    await Session(harness, name="one-more").kept("true")
    await harness.reset()
    assert (await sessions[1].run("echo x=$x")).text == "x=\n"


async def test_a_change_of_rights_ends_the_shells_and_says_so(make_harness: Maker) -> None:
    harness = await make_harness(slots=1)
    session = Session(harness)
    await session.kept("x=5")
    await harness.ask("narrow", network=False)
    after = await session.run("echo x=$x")
    assert (after.text, after.metadata["session"]) == ("x=\n", "restarted")
    assert "rights of its lease were changed" in after.metadata["session_reason"]


@pytest.mark.parametrize(
    ("args", "named"), [({"command": 5}, "command"), ({"command": "x", "session": "a b"}, "session"), ({"command": "x", "cwd": "/"}, "cwd")]
)
async def test_wrong_arguments_are_named(harness: AgentHarness, args: dict[str, Any], named: str) -> None:
    answer = await harness.call("bash_stateful", args=args)
    assert answer.reason == "invalid_args"
    assert named in answer.error

"""Calls and their results."""

from __future__ import annotations

import asyncio
import time

import pytest

from sandbox_server.agent.init.reports import REQUEST_BYTES
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.conftest import Maker


async def test_a_command_runs_without_privileges(harness: AgentHarness) -> None:
    answer = await harness.bash("id -u; grep -E 'Cap(Eff|Prm|Inh|Amb)|NoNewPrivs|Seccomp:' /proc/self/status; echo $HOME; pwd; echo oops >&2; exit 7")

    assert (answer.reason, answer.code) == ("exit", 7)
    uid, *status, home, cwd, oops = answer.text.split("\n")[:-1]
    assert uid != "0"
    assert [line.split()[1].strip("0") for line in status] == ["", "", "", "", "1", "2"]
    assert home == cwd
    assert oops == "oops"


async def test_the_environment_is_the_slots_own(harness: AgentHarness) -> None:
    answer = await harness.bash("env", env={"MINE": "yes"})

    names = {line.partition("=")[0] for line in answer.text.splitlines()} - {"_", "SHLVL", "PWD", "TMPDIR"}
    assert names == {"PATH", "LANG", "TERM", "HOME", "SHELL", "SANDBOX_WORKSPACE", "OMP_NUM_THREADS", "PYTHON_CPU_COUNT", "MINE"}


@pytest.mark.parametrize("size", [100, REQUEST_BYTES - 2000, REQUEST_BYTES - 1000, REQUEST_BYTES, 2 * REQUEST_BYTES])
async def test_a_command_of_any_length_arrives_whole(bwrap: AgentHarness, size: int) -> None:
    answer = await bwrap.bash(": %s; echo ${#BASH_EXECUTION_STRING}" % ("x" * size))

    assert answer.text == f"{size + len(': ; echo ${#BASH_EXECUTION_STRING}')}\n"


async def test_calls_of_one_stream_run_in_order_and_a_failed_one_does_not_stop_the_next(bwrap: AgentHarness) -> None:
    specs = [{"call_id": f"c{n}", "tool": "bash", "args": {"command": f"echo {n} >> log; exit {n}"}, "timeout_s": 10} for n in range(5)]
    answers = await bwrap.calls([*specs, {"call_id": "last", "tool": "bash", "args": {"command": "cat log"}, "timeout_s": 10}])

    assert [answer.code for answer in answers] == [0, 1, 2, 3, 4, 0]
    assert answers[-1].text == "0\n1\n2\n3\n4\n"


async def test_a_call_never_runs_twice(bwrap: AgentHarness) -> None:
    first, second = await asyncio.gather(
        bwrap.bash("echo x >> log; sleep 0.3; cat log", call_id="same"), bwrap.bash("echo x >> log; sleep 0.3; cat log", call_id="same")
    )
    third = await bwrap.bash("echo x >> log; sleep 0.3; cat log", call_id="same")
    other = await bwrap.bash("echo y >> log", call_id="same")

    assert first == second == third
    assert first.text == "x\n"
    assert other.reason == "call_conflict"


INVALID: list[tuple[str, dict[str, object], str]] = [
    ("bash", {"command": "echo \0"}, "command"),
    ("bash", {"command": "true", "cwd": "a\0b"}, "cwd"),
    ("bash", {"command": "true", "env": {"A": "b\0"}}, "env.A"),
    ("bash", {"command": "true", "env": {"A=": "b"}}, "env"),
    ("bash", {"command": "x" * ((1 << 20) + 1)}, "command"),
    ("bash", {"command": 3}, "command"),
    ("bash", {}, "command"),
    ("bash", {"command": "true", "nonsense": 1}, "nonsense"),
    ("bash", {"command": "true", "stdin": 5}, "stdin"),
    ("read_file", {"path": "x", "lines": 3}, "lines"),
    ("process", {"action": "dance"}, "action"),
    ("no_such_tool", {}, "no_such_tool"),
]


async def test_an_invalid_argument_is_named(bwrap: AgentHarness) -> None:
    specs = [{"call_id": f"c{number}", "tool": tool, "args": args, "timeout_s": 10} for number, (tool, args, _) in enumerate(INVALID)]
    answers = await bwrap.calls(specs)

    for (tool, args, named), answer in zip(INVALID, answers, strict=True):
        assert answer.reason == "invalid_args", (tool, args)
        assert named in answer.error, (tool, args)


async def test_a_missing_working_directory_is_reported(harness: AgentHarness) -> None:
    answer = await harness.bash("true", cwd="nowhere")

    assert answer.reason == "tool_error"
    assert "nowhere" in answer.error


async def test_a_relative_folder_starts_in_the_workspace(harness: AgentHarness) -> None:
    await harness.bash("mkdir -p a/b")

    assert (await harness.bash("pwd", cwd="a/b")).text.endswith("/a/b\n")


async def test_a_long_command_runs(bwrap: AgentHarness) -> None:
    answer = await bwrap.bash("cat <<'end' | wc -c\n" + "x" * 900_000 + "\nend\n")

    assert (answer.reason, answer.text) == ("exit", "900001\n")


async def test_stdin_has_the_given_content_or_is_empty(bwrap: AgentHarness) -> None:
    assert (await bwrap.bash("wc -c", stdin="é" * 100_000)).text == "200000\n"
    assert (await bwrap.bash("cat; echo end")).text == "end\n"


async def test_standard_output_and_error_can_be_kept_apart(bwrap: AgentHarness) -> None:
    answer = await bwrap.bash("echo out; echo err >&2", separate_streams=True)

    assert answer.meta["lens"] == [4, 4]
    assert answer.body == b"out\nerr\n"


async def test_output_over_the_limit_is_cut_in_the_result_and_kept_as_a_whole(bwrap: AgentHarness) -> None:
    answer = await bwrap.bash("seq 1000000", call_id="seq", output_limit_bytes=1000)

    whole = b"".join(b"%d\n" % number for number in range(1, 1_000_001))
    assert answer.meta["truncated"]
    assert answer.meta["output_bytes"] == len(whole)
    assert answer.body == whole[:500] + b"\n[... %d bytes cut ...]\n" % (len(whole) - 1000) + whole[-500:]
    assert await bwrap.data("output", call_id="seq") == (whole, {"total_bytes": len(whole), "from": 0, "available_bytes": len(whole)})
    assert (await bwrap.data("output", call_id="seq", offset=len(whole) - 3))[0] == whole[-3:]


async def test_output_beyond_the_spool_is_bounded_and_keeps_its_end(make_harness: Maker) -> None:
    harness = await make_harness(spool_bytes=2 << 20)

    answer = await harness.bash("head -c 30000000 /dev/zero | tr '\\0' x; echo the end", call_id="big")

    assert answer.meta["output_bytes"] == 30_000_008
    assert answer.body.endswith(b"x" * 100 + b"the end\n")
    whole, meta = await harness.data("output", call_id="big")
    assert len(whole) == 2 << 20
    assert meta["total_bytes"] == 30_000_008


async def test_output_bytes_are_not_changed(bwrap: AgentHarness) -> None:
    answer = await bwrap.bash("printf '\\000\\377\\200'; head -c 10000000 /dev/zero | tr '\\0' y", output_limit_bytes=10 << 20)

    assert answer.body == b"\x00\xff\x80" + b"y" * 10_000_000


async def test_a_process_that_a_signal_ends_has_an_exit_code_above_128(bwrap: AgentHarness) -> None:
    assert (await bwrap.bash("kill -USR1 $$")).code == 128 + 10


async def test_a_file_over_the_limit_is_a_resource_limit(make_harness: Maker) -> None:
    harness = await make_harness(limits={"max_file_mb": 1})

    answer = await harness.bash("exec head -c 3000000 /dev/zero > big")

    assert (answer.reason, answer.code) == ("resource_limit", 128 + 25)


async def test_a_background_process_outlives_its_call_and_does_not_delay_its_end(harness: AgentHarness) -> None:
    began = time.monotonic()
    answer = await harness.bash("(sleep 0.5; echo late; echo done > marker) & echo now")

    assert time.monotonic() - began < 0.4
    assert answer.text == "now\n"
    await harness.until("grep -q done marker")


async def test_a_background_process_that_writes_much_outlives_its_call_and_costs_little(bwrap: AgentHarness) -> None:
    await bwrap.bash("yes & echo $! > pid")
    before = _cpu_s(bwrap.process.pid)
    await bwrap.bash("sleep 1; kill -0 $(cat pid)")

    assert (await bwrap.bash("kill $(cat pid)")).code == 0
    assert _cpu_s(bwrap.process.pid) - before < 0.5


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        return int(file.read().split()[0]) / 1e9


async def test_status_and_attach_follow_a_running_call(bwrap: AgentHarness) -> None:
    running = asyncio.create_task(bwrap.bash("echo one; until [ -e go ]; do sleep 0.02; done; echo two", call_id="slow"))
    await bwrap.until("[ -e /proc/self ]")
    attached = asyncio.create_task(bwrap.data("attach", call_id="slow", offset=1))
    status = await bwrap.ask("call_status", call_id="slow")
    await bwrap.bash("touch go")
    answer = await running

    assert status["state"] == "running"
    assert answer.text == "one\ntwo\n"
    assert (await attached)[0] == b"ne\ntwo\n"
    assert (await bwrap.ask("cancel", call_id="slow")) == {"found": True, "state": "done"}
    assert (await bwrap.ask("cancel", call_id="unknown")) == {"found": False}


async def test_a_job_is_started_and_inspected_later(bwrap: AgentHarness) -> None:
    started = await bwrap.call("process", args={"action": "start", "command": "echo hello; read line; echo got $line; exit 3"})
    job = started.metadata["process_id"]
    await bwrap.call("process", args={"action": "write", "process_id": job, "data": "you\n"})

    async def state() -> dict[str, object]:
        return (await bwrap.call("process", args={"action": "poll", "process_id": job})).metadata

    while (await state())["state"] == "running":
        await asyncio.sleep(0.02)
    log = await bwrap.call("process", args={"action": "log", "process_id": job})
    listed = await bwrap.call("process", args={"action": "list"})

    assert (await state())["exit_code"] == 3
    assert log.text == "hello\ngot you\n"
    assert [entry["process_id"] for entry in listed.metadata["processes"]] == [job]
    assert (await bwrap.call("process", args={"action": "write", "process_id": job, "data": "x"})).reason == "tool_error"
    assert (await bwrap.call("process", args={"action": "poll", "process_id": "p99"})).reason == "tool_error"


async def test_a_killed_job_ends_with_its_descendants(harness: AgentHarness) -> None:
    started = await harness.call("process", args={"action": "start", "command": "sleep 4321 & echo $! > pid; wait"})
    await harness.until("[ -s pid ]")
    await harness.call("process", args={"action": "kill", "process_id": started.metadata["process_id"]})

    await harness.until("! kill -0 $(cat pid) 2>/dev/null")


async def test_file_tools_use_the_paths_that_the_slot_sees(harness: AgentHarness) -> None:
    assert (await harness.call("write_file", args={"path": "a/b.txt", "content": "one\ntwo\n"})).meta["tool_ok"]
    assert (await harness.call("edit_file", args={"path": "a/b.txt", "old": "two", "new": "three"})).meta["tool_ok"]
    assert (await harness.call("read_file", args={"path": "a/b.txt"})).text == "one\nthree\n"
    assert "b.txt" in (await harness.call("list_files", args={"path": "a"})).text
    assert "three" in (await harness.call("search_files", args={"pattern": "th.ee"})).text
    missing = await harness.call("read_file", args={"path": "nowhere"})
    assert (missing.reason, missing.meta["exit_code"]) == ("tool_error", None)
    assert "nowhere" in missing.error

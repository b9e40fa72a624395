"""Processes of a slot that are stopped, end early or end at once do not block the agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.server.file_operations import STALL_S, FileOperation, open_file_operation
from sandbox_server.agent.slots.slots import AgentSlot
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.agent_parts import open_slot_transitions


async def test_every_call_of_a_batch_that_ends_at_once_gets_a_result(harness: AgentHarness) -> None:
    first = {"call_id": "c0", "tool": "bash", "args": {"command": "sleep 0.5"}, "timeout_s": 20}
    rest = [{"call_id": f"c{number}", "tool": "process", "args": {"action": "list"}, "timeout_s": 20} for number in range(1, 600)]
    answers = await harness.calls([first, *rest])

    assert [answer.meta["call_id"] for answer in answers] == [f"c{number}" for number in range(600)]
    assert {answer.reason for answer in answers} == {"exit"}


async def test_the_output_can_be_opened_by_its_name(harness: AgentHarness) -> None:
    answer = await harness.bash("echo out > /dev/stdout; echo err > /dev/stderr; python3 -c \"open('/dev/stdout', 'w').write('again')\"")

    assert answer.text == "out\nerr\nagain"


async def test_a_slot_whose_init_is_stopped_is_ended_in_time_and_a_reset_repairs_it(all_breakable: list[AgentHarness]) -> None:
    await asyncio.gather(*map(_stop_init_and_repair, all_breakable))


async def _stop_init_and_repair(harness: AgentHarness) -> None:
    # No other test on this machine sleeps for as long: slots of the mode `uid` see its processes.
    first_s, second_s = random.sample(range(10**6, 10**7), 2)
    is_running = f"pgrep -x -f 'sleep ({first_s}|{second_s})'"
    other = asyncio.create_task(harness.bash(f"sleep {first_s}", call_id="other"))
    await harness.until(f"{is_running} >/dev/null")
    running = asyncio.create_task(harness.bash(f"sleep {second_s}", timeout_s=1))
    await asyncio.sleep(0.3)
    for init in harness.inits():
        init.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    answer, lost = await running, await other

    assert time.monotonic() - began < 1 + 3 + 1
    assert answer.reason == "timeout"
    assert lost.reason in ("sandbox_lost", "timeout"), lost.meta
    if lost.reason == "sandbox_lost":
        assert lost.metadata["evidence"]["own_work"] is True
    for init in harness.inits():
        with contextlib.suppress(psutil.NoSuchProcess):
            init.send_signal(signal.SIGCONT)
    answered = await harness.reset()
    if lost.reason == "sandbox_lost" and harness.link.hello["isolation"] == "none":
        assert answered["state"] == "quarantined"  # without a pid namespace nothing proves that all processes have ended
        for process in psutil.process_iter(["cmdline"]):
            if process.info["cmdline"] in (["sleep", str(first_s)], ["sleep", str(second_s)]):
                process.kill()
        return
    assert answered["state"] == "ready"
    assert (await harness.bash(is_running)).text == ""
    assert (await harness.bash("echo back")).text == "back\n"


async def test_a_command_in_a_folder_that_is_not_there_is_an_error_of_the_call(harness: AgentHarness) -> None:
    answer = await harness.bash("true", cwd="nowhere")

    assert answer.reason == "tool_error"
    assert answer.metadata["errno"] == "ENOENT"


class _Wire:
    """Records what a file operation sends to the service."""

    def __init__(self) -> None:
        self.end_meta: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.taken = 0

    def acknowledge(self, data: bytes) -> None:
        self.taken += len(data)

    def end_stream(self, meta: dict[str, Any]) -> None:
        self.end_meta.set_result(meta)

    def refuse(self, error: Refused) -> None:
        self.end_meta.set_exception(error)


@contextlib.asynccontextmanager
async def _putting(stall_s: float = STALL_S) -> AsyncIterator[tuple[FileOperation, _Wire, AgentSlot, psutil.Process]]:
    """An upload to the slot in the process of the test that waits for more content, and the init of the slot."""
    async with open_slot_transitions() as transitions:
        wire = _Wire()
        op = open_file_operation(wire, transitions.slot, {"op": "file_put", "path": "file"}, stall_s)  # type: ignore[arg-type]
        assert isinstance(op, FileOperation)
        op.on_data(b"x" * 1000)
        init = psutil.Process(transitions.slot.current_runtime().init_pid)
        await _until(lambda: wire.taken == 1000 and bool(init.children()))
        yield op, wire, transitions.slot, init


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def _workspace(slot: AgentSlot) -> Path:
    return Path(slot.current_runtime().dirs.workspace)


async def test_incomplete_content_is_not_put_in_place_however_late_its_writer_is_killed() -> None:
    async with _putting() as (op, _, slot, init):
        (child,) = init.children()
        init.suspend()
        op.on_abort()
        with contextlib.suppress(psutil.TimeoutExpired):
            await asyncio.get_running_loop().run_in_executor(
                None, child.wait, 0.4
            )  # long enough for the child to take the end of its input for the end of the content
        assert not (_workspace(slot) / "file").exists()
        init.resume()
        await _until(lambda: not init.children())

        assert os.listdir(_workspace(slot)) == []


async def test_an_upload_whose_writer_makes_no_progress_is_ended() -> None:
    async with _putting(stall_s=0.5) as (op, wire, slot, init):
        (child,) = init.children()
        child.suspend()
        op.on_data(b"x" * 1_000_000)
        op.on_end()
        with pytest.raises(Refused) as refused:
            await asyncio.wait_for(wire.end_meta, 5)
        await _until(lambda: not init.children())

        assert refused.value.meta()["errno"] == "ETIMEDOUT"
        assert slot.state == "ready"


async def test_an_upload_may_wait_for_the_service() -> None:
    async with _putting(stall_s=0.2) as (op, wire, slot, _):
        await asyncio.sleep(0.7)
        op.on_data(b"y")
        op.on_end()
        meta = await asyncio.wait_for(wire.end_meta, 5)

        assert meta["size_bytes"] == 1001
        assert (_workspace(slot) / "file").stat().st_size == 1001

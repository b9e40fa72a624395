"""The processor time of a call, on a machine that is so busy that the agent runs again only long after it has asked for the process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sandbox_server.agent.config import SlotLimits
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.call_spec import CallSpec
from sandbox_server.agent.execution.calls import submit_call
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.lease_context import LeaseContext, SlotResources
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.processor_times import GroupProcessorTimes


class BusyMachine:
    """The control group of a call and the link to init: by the time at which the agent runs again after its request, the process has used 0.2 s."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "cpu.stat"
        self._use(0.1)  # by earlier calls in the same control group
        times = GroupProcessorTimes(str(folder))
        self.leaf = SimpleNamespace(processor_times=times, slot_processor_times=times, is_in_use=True)

    def _use(self, used_s: float) -> None:
        self._file.write_text(f"usage_usec {int(used_s * 1e6)}\n")

    def take_leaf(self) -> tuple[Any, int]:
        return self.leaf, -1

    def start_process(self, request: dict[str, Any], fds: Sequence[int], listener: object) -> int:
        self._use(0.1 + 0.2)
        return 1


async def test_what_a_process_uses_before_the_agent_runs_again_counts(tmp_path: Path) -> None:
    machine = BusyMachine(tmp_path)
    runtime = SimpleNamespace(
        groups=SimpleNamespace(leaves=machine, limits=None), link=machine, init_pid=0, uid=None, shell="/bin/bash", workspace="/workspace"
    )
    drains = Drains(asyncio.get_running_loop(), 10)
    lease = LeaseContext(SlotResources("0", SlotLimits(), lambda: 1.0, drains, BackgroundTasks("0")), 1, str(tmp_path / "spool"), 1 << 20)
    outcomes: list[CallOutcome] = []
    spec = CallSpec("c", "bash", {"command": "true"}, timeout_s=60.0, no_output_timeout_s=None, output_limit_bytes=1000, separate_streams=False)

    submit_call(lease, cast(SlotRuntime, runtime), spec, outcomes.append)
    await asyncio.sleep(0.02)  # a call that ends within 10 ms is not measured
    lease.end_calls_and_jobs()
    drains.close_pipes()

    assert [round(outcome.cpu_s, 3) for outcome in outcomes] == [0.2]

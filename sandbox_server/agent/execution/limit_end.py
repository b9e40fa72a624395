"""Ending all processes of a slot that used too much of something that slots share, and finding out later that this happened."""

from __future__ import annotations

import logging

from sandbox_server.agent.execution.processes.slot_kill import kill_slot_processes
from sandbox_server.agent.execution.slot_runtime import LimitEnd, SlotRuntime
from sandbox_server.agent.kernel.memory_groups import had_filled_group_alone, was_ended_by_another_agent

log = logging.getLogger(__name__)


async def end_slot_for_limit(runtime: SlotRuntime, end: LimitEnd) -> None:
    """End all processes of a slot. Its calls end with the reason in `end`.

    Args:
        runtime: the slot runtime.
        end: why.
    """
    log.warning("all processes of a slot are ended: %s", end.error, extra={"slot_id": runtime.slot_id, "detail": str(dict(end.evidence))})
    runtime.limit_end = end
    await kill_slot_processes(runtime, end.error, own_work=end.own_work)


def find_limit_end(runtime: SlotRuntime) -> LimitEnd | None:
    """Return why all processes of a slot were ended because of a limit, by this agent or by another one on the machine. None: they were not."""
    folder = runtime.groups.limits.memory_folder if runtime.groups.limits is not None else None
    if runtime.limit_end is None and folder is not None and was_ended_by_another_agent(folder):
        evidence = {"machine_full": True, "ended_by": "another agent of the machine"}
        text = "the machine's memory for slots was full, and this slot was furthest above its share"
        runtime.limit_end = LimitEnd("oom", text, evidence, had_filled_group_alone(folder))
    return runtime.limit_end

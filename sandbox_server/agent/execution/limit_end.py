"""Ending a whole slot for what it took of the machine: who decided, why, and how its calls hear of it."""

from __future__ import annotations

import logging

from sandbox_server.agent.execution.init_client.init_watchdog import end_slot
from sandbox_server.agent.execution.slot_runtime import LimitEnd, SlotRuntime
from sandbox_server.agent.kernel.memory_groups import had_filled_group_alone, was_ended_by_another_agent

log = logging.getLogger(__name__)


async def end_slot_for_limit(body: SlotRuntime, end: LimitEnd) -> None:
    """End every process of a slot; its calls end with this reason, whatever else is seen of their end."""
    log.warning("a slot is ended: %s", end.error, extra={"slot_id": body.slot_id, "detail": str(dict(end.evidence))})
    body.limit_end = end
    await end_slot(body, end.error, self_inflicted=end.self_inflicted)


def find_limit_end(body: SlotRuntime | None) -> LimitEnd | None:
    """Why a slot was ended for what it took, by this agent or by another of the machine; None: it was not."""
    if body is None:
        return None
    folder = body.groups.limits.memory_folder if body.groups.limits is not None else None
    if body.limit_end is None and folder is not None and was_ended_by_another_agent(folder):
        evidence = {"machine_full": True, "ended_by": "another agent of the machine"}
        text = "the machine's memory for slots was full, and this slot was furthest above its share"
        body.limit_end = LimitEnd("oom", text, evidence, had_filled_group_alone(folder))
    return body.limit_end

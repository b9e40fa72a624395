"""Ending a whole slot for what it took of the machine: who decided, why, and how its calls hear of it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Mapping

from sandbox_server.agent.isolation.base import Body
from sandbox_server.agent.memory_groups import was_ended
from sandbox_server.agent.stuck import end_slot

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LimitEnd:
    """Why a slot was ended.

    Args:
        reason: of the calls that ran in it.
        error: what happened, as a sentence.
        evidence: what that rests on.
        own_limit: whether it was over a limit of its own. Else something that all share was full, which is not proven to be this slot's doing alone.
    """

    reason: str
    error: str
    evidence: Mapping[str, Any]
    own_limit: bool

    def metadata(self) -> dict[str, Any]:
        """The metadata of a call that ended with the slot."""
        return {"evidence": {**self.evidence, "slot_ended": True, **({"own_work": True} if self.own_limit else {"ambiguous": True})}}


async def end_for_limit(body: Body, end: LimitEnd) -> None:
    """End every process of a slot; its calls end with this reason, whatever else is seen of their end."""
    log.warning("a slot is ended: %s", end.error, extra={"slot_id": body.slot_id, "detail": str(dict(end.evidence))})
    body.limit_end = end
    await end_slot(body, end.error, own_work=end.own_limit)


def limit_end_of(body: Body | None) -> LimitEnd | None:
    """Why a slot was ended for what it took, by this agent or by another of the machine; None: it was not."""
    if body is None:
        return None
    if body.limit_end is None and _was_marked(body):
        evidence = {"machine_full": True, "ended_by": "another agent of the machine"}
        body.limit_end = LimitEnd("oom", "the machine's memory for slots was full, and this slot was furthest above its share", evidence, own_limit=False)
    return body.limit_end


def _was_marked(body: Body) -> bool:
    limits = body.groups.limits
    folder = limits.memory_folder if limits is not None else None
    return folder is not None and was_ended(folder)

"""The test of resets: an agent plants leftovers of every kind in a free slot, and the reset must remove them all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from sandbox_server.core.errors import NoCapacity, NotImplementedHere
from sandbox_server.link import AgentRefused, LinkLost
from sandbox_server.link.agent_reports import VerifyReport
from sandbox_server.link.errors import NotSupportedByAgent
from sandbox_server.pool.leasing.held_lease import ResetOrder
from sandbox_server.pool.pool import Pool

MAX_CHARS = 2000


async def verify(pool: Pool) -> Mapping[str, Any]:
    """Verify every slot that is free now. The test goes on even if its caller is cancelled.

    Args:
        pool: the pool.

    Returns:
        `{"pool", "slots": [{"sandbox_id", "slot_id", "planted": [{"kind", "detail"}], "found", "left", "clean", "duration_s"}], "clean"}`.

    Raises:
        NoCapacity: no slot is free.
        NotImplementedHere: the agents have no such test.
    """
    orders = pool.book.reclaim_free_slots()
    if not orders:
        held = pool.book.held_slot_count()
        if held:
            raise NoCapacity(f"pool {pool.name!r} has no free slot to verify: its free ones ({held}) are held for an acquire that waits: try again later")
        raise NoCapacity(f"pool {pool.name!r} has no free slot to verify: try again when one is")
    task = asyncio.gather(*(_verify(pool, order) for order in orders))
    slots = await asyncio.shield(task)
    return {"pool": pool.name, "slots": slots, "clean": all(slot["clean"] for slot in slots)}


async def _verify(pool: Pool, order: ResetOrder) -> dict[str, Any]:
    began = pool.now()
    where = {"sandbox_id": order.ref.sandbox_id, "slot_id": order.ref.name}
    try:
        supervisor = pool.supervisors.supervisor_of(order.ref.sandbox_id)
        if supervisor is None:
            raise LinkLost("its sandbox is gone")
        report = await supervisor.verify_slot(order)
    except NotSupportedByAgent as refused:
        raise NotImplementedHere(f"the agents of pool {pool.name!r} cannot verify resets: {refused.detail}") from None
    except AgentRefused as refused:
        return {**where, **_document(VerifyReport()), "detail": f"its agent refused: {refused.detail}"[:MAX_CHARS], "duration_s": pool.now() - began}
    except LinkLost as lost:
        return {**where, **_document(VerifyReport()), "detail": f"its agent cannot be reached: {lost}"[:MAX_CHARS], "duration_s": pool.now() - began}
    return {**where, **_document(report), "duration_s": pool.now() - began}


def _document(report: VerifyReport) -> dict[str, Any]:
    return {
        "planted": [{"kind": item.kind, "detail": item.detail} for item in report.planted],
        "found": list(report.found),
        "left": list(report.left),
        "clean": report.is_clean,
    }

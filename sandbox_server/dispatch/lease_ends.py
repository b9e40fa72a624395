"""Ends the calls of leases that have ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

log = logging.getLogger(__name__)


async def follow_lease_ends(lease_ids: AsyncIterator[str], handle_lease_end: Callable[[str], None]) -> None:
    """Handle the end of each lease, in order, until the task is cancelled.

    Args:
        lease_ids: the ids of the leases that end, without an end.
        handle_lease_end: ends the calls of one lease, as `Dispatcher.handle_lease_end` does. If it fails, the error is logged, and the ends of the
            other leases are handled all the same.
    """
    try:
        async for lease_id in lease_ids:
            try:
                handle_lease_end(lease_id)
            except Exception:  # a fault with one lease must not end the loop that all leases depend on
                log.exception("the calls of an ended lease could not be ended", extra={"lease_id": lease_id})
    except Exception:  # nobody awaits this task, so that the error would be lost
        log.exception("ends of leases are not reported any more: calls of ended leases continue until they end by themselves")

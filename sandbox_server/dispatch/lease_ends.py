"""Ends the calls and terminals of leases that have ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable

log = logging.getLogger(__name__)


async def follow_lease_ends(lease_ids: AsyncIterator[str], *handlers: Callable[[str], None]) -> None:
    """Handle the end of each lease, in order, until the task is cancelled.

    Args:
        lease_ids: the ids of the leases that end, without an end.
        handlers: each ends something of one lease, as `Dispatcher.handle_lease_end` ends its calls. If one fails, the error is logged, and the others
            and the ends of other leases are handled all the same.
    """
    try:
        async for lease_id in lease_ids:
            for handle_lease_end in handlers:
                try:
                    handle_lease_end(lease_id)
                except Exception:  # a fault with one lease must not end the loop that all leases depend on
                    log.exception("the calls or terminals of an ended lease could not be ended", extra={"lease_id": lease_id})
    except Exception:  # nobody awaits this task, so that the error would be lost
        log.exception("ends of leases are not reported any more: calls of ended leases continue until they end by themselves")

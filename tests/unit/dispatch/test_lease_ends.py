"""The loop that ends the calls of leases that have ended."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import pytest

from sandbox_server.dispatch.lease_ends import follow_lease_ends


async def ended_leases(*lease_ids: str, error: Exception | None = None) -> AsyncIterator[str]:
    """Yield ids of leases, then raise the error, if there is one."""
    for lease_id in lease_ids:
        yield lease_id
    if error is not None:
        raise error


async def test_a_fault_with_one_lease_is_logged_and_the_next_leases_are_handled(caplog: pytest.LogCaptureFixture) -> None:
    handled: list[str] = []

    def handle_lease_end(lease_id: str) -> None:
        if lease_id == "l-bad":
            raise KeyError("runner")
        handled.append(lease_id)

    with caplog.at_level(logging.ERROR):
        await follow_lease_ends(ended_leases("l-1", "l-bad", "l-2"), handle_lease_end)

    assert handled == ["l-1", "l-2"]
    (record,) = caplog.records
    assert record.message == "the calls or terminals of an ended lease could not be ended"
    assert record.__dict__["lease_id"] == "l-bad"
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], KeyError)


async def test_the_end_of_the_loop_by_a_fault_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    handled: list[str] = []

    with caplog.at_level(logging.ERROR):
        await follow_lease_ends(ended_leases("l-1", error=RuntimeError("the queue is broken")), handled.append)

    assert handled == ["l-1"]
    (record,) = caplog.records
    assert record.message.startswith("ends of leases are not reported any more")
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], RuntimeError)

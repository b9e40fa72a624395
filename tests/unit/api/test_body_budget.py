"""The memory of request bodies: each tenant has half, waits in order, and gives back what it held."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.api.body_budget import BodyBudget
from sandbox_server.api.limits import Limits
from sandbox_server.core.errors import PayloadTooLarge, QuotaExceeded
from sandbox_server.dispatch.limits.room_queue import MAX_WAITING


def budget(wait_s: int = 30) -> BodyBudget:
    return BodyBudget(Limits(body_memory_bytes=1000, body_wait_s=wait_s))


async def test_a_tenant_has_half_and_leaves_the_other_half() -> None:
    bodies = budget(wait_s=0)
    held = await bodies.reserve("a", 500)

    with pytest.raises(QuotaExceeded, match=r"body_memory_bytes.*body_wait_s"):
        await bodies.reserve("a", 1)
    await bodies.reserve("b", 500)
    held.release()
    held.release()
    await bodies.reserve("a", 500)


async def test_what_a_tenant_can_never_have_is_refused_at_once() -> None:
    with pytest.raises(PayloadTooLarge, match="body_memory_bytes"):
        await budget().reserve("a", 501)


async def test_bodies_wait_in_order_and_one_that_leaves_holds_nobody_up() -> None:
    bodies = budget()
    held = await bodies.reserve("a", 400)
    large = asyncio.create_task(bodies.reserve("a", 450))
    await asyncio.sleep(0)
    small = asyncio.create_task(bodies.reserve("a", 50))
    await asyncio.sleep(0)
    assert not small.done()

    large.cancel()
    reservation = await small
    reservation.release()
    held.release()
    again = await bodies.reserve("a", 500)
    again.release()
    await asyncio.gather(large, return_exceptions=True)


async def test_one_admitted_as_it_leaves_gives_its_memory_back() -> None:
    bodies = budget()
    held = await bodies.reserve("a", 500)
    waiting = asyncio.create_task(bodies.reserve("a", 500))
    await asyncio.sleep(0)

    held.release()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)

    (await asyncio.wait_for(bodies.reserve("a", 500), 1.0)).release()


async def test_no_more_than_so_many_wait() -> None:
    bodies = budget()
    held = await bodies.reserve("a", 500)
    waiting = [asyncio.create_task(bodies.reserve("a", 1)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)

    with pytest.raises(QuotaExceeded, match="wait for memory already"):
        await bodies.reserve("a", 1)
    held.release()
    await asyncio.gather(*waiting)

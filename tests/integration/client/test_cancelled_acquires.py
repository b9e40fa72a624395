"""Tests with a real service of acquires that are cancelled: whatever the moment, no lease stays held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from env_client import AsyncSandboxClient, LeaseLost, SandboxClient
from tests.support.service import Service

POOL = "cancelled-acquires"
SLOT_COUNT = 4


@pytest.fixture(scope="module", autouse=True)
def _pool(service: Service) -> Iterator[None]:
    """The pool of these tests, with four slots."""
    with SandboxClient(service.url, service.token) as client:
        client.pool_put(POOL, {"slots_per_sandbox": SLOT_COUNT, "max_sandboxes": 1})
        client.acquire(POOL, SLOT_COUNT, run_id=POOL, wait_s=60)  # so that the sandbox has started
        client.release(run_id=POOL)
        yield
        client.pool_delete(POOL, force=True)


@pytest.fixture
async def client(service: Service) -> AsyncIterator[AsyncSandboxClient]:
    async with AsyncSandboxClient(service.url, service.token) as opened:
        yield opened


async def held_count(client: AsyncSandboxClient) -> int:
    return len([lease async for lease in client.iter_leases() if lease.pool == POOL])


async def wait_for_queue(client: AsyncSandboxClient, count: int) -> None:
    while (await client.pool(POOL)).queue != count:
        await asyncio.sleep(0.002)  # no event reports it


@pytest.mark.parametrize("cache", [None, "rw"])
async def test_an_acquire_that_is_cancelled_at_any_moment_leaves_no_lease(client: AsyncSandboxClient, cache: str | None) -> None:
    delivered_count = 0
    for number in range(30):
        acquire = asyncio.create_task(client.acquire(POOL, count=1 + number % 2, cache=cache, wait_s=30))
        await asyncio.wait({acquire}, timeout=number * 0.0003)
        acquire.cancel()
        await asyncio.wait({acquire})
        if not acquire.cancelled():
            delivered_count += 1
            await client.release([lease.lease_id for lease in acquire.result().leases])
        assert await held_count(client) == 0
    assert delivered_count < 30


async def test_many_at_once(client: AsyncSandboxClient) -> None:
    acquires = [asyncio.create_task(client.acquire(POOL, wait_s=30)) for _ in range(40)]
    await asyncio.wait(acquires, return_when=asyncio.FIRST_COMPLETED)
    for acquire in acquires:
        acquire.cancel()
    await asyncio.wait(acquires)
    delivered = [lease.lease_id for acquire in acquires if not acquire.cancelled() for lease in acquire.result().leases]
    await client.release(delivered)
    assert (await held_count(client), (await client.pool(POOL)).queue) == (0, 0)


async def test_a_gang_that_waits_in_the_queue(client: AsyncSandboxClient) -> None:
    async def hold_gang() -> None:
        async with client.gang(2, POOL, wait_s=60):
            raise AssertionError("it was served")

    async with client.gang(SLOT_COUNT - 1, POOL, wait_s=60):
        waiting = asyncio.create_task(hold_gang())
        await wait_for_queue(client, 1)
        for _ in range(2):  # as a caller does that loses its patience
            waiting.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ((await client.pool(POOL)).queue, await held_count(client)) == (0, SLOT_COUNT - 1)
    assert await held_count(client) == 0


async def test_a_key_of_the_caller_stays_its_own_until_it_is_released(client: AsyncSandboxClient) -> None:
    async with client.gang(SLOT_COUNT, POOL, wait_s=60):
        waiting = asyncio.create_task(client.acquire(POOL, request_key="own", wait_s=60))
        await wait_for_queue(client, 1)
        waiting.cancel()
        await asyncio.wait({waiting})
    (lease,) = (await client.acquire(POOL, request_key="own", wait_s=60)).leases

    assert (await client.release(request_key="own")).released == (lease.lease_id,)
    with pytest.raises(LeaseLost):
        await client.acquire(POOL, request_key="own", wait_s=60)
    assert await held_count(client) == 0


async def test_an_acquire_that_arrives_after_its_release(client: AsyncSandboxClient, service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, headers={"Authorization": f"Bearer {service.token}"}) as http:
        released = await http.post("/v1/release", json={"request_key": "late"})
        late = await http.post("/v1/acquire", json={"pool": POOL, "count": 2, "request_key": "late"})

    assert (released.json(), late.status_code, late.json()["code"]) == ({"released": [], "unknown": []}, 410, "lease_lost")
    assert late.json()["detail"] == "request_key 'late' was released, so nothing is leased under it: acquire with another request_key"
    assert await held_count(client) == 0

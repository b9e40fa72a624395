"""Sandboxes are made as fast as a backend bears, whatever the number of pools that want them."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.backends.base import CreateFailed, RateLimited
from sandbox_server.core.types import AcquireRequest, PoolSpec
from sandbox_server.pool.fleet.supervision.creation_budget import LONGEST_CREATION_PAUSE_S, CreationBudget
from sandbox_server.testing import FakeBackend, FakeClock, settle
from tests.unit.pool.conftest import PoolsHarness


class Making:
    """Creations that begin when the budget lets them, and end when the test does."""

    def __init__(self, at_once=2, per_s=4.0):
        self.clock = FakeClock()
        self.budget = CreationBudget("b", at_once=at_once, per_s=per_s, clock=self.clock, timers=self.clock)
        self.began = []
        self.under_way = []
        self.tasks = []

    async def begin(self, count):
        self.tasks += [asyncio.create_task(self.one()) for _ in range(count)]
        await settle()

    async def one(self):
        async with self.budget.reserve_creation():
            self.began.append(self.clock.monotonic() - 1000.0)
            self.under_way.append(asyncio.get_running_loop().create_future())
            await self.under_way[-1]

    async def end(self, number, error=None):
        future = self.under_way[number]
        future.set_exception(error) if error else future.set_result(None)
        await settle()


@pytest.fixture
async def making():
    made = Making()
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_so_many_at_once(making):
    await making.begin(3)
    await making.clock.advance(60)
    assert making.began == [0.0, 0.0]

    await making.end(0)

    assert making.began == [0.0, 0.0, 60.0]


async def test_so_many_a_second_beyond_the_first(making):
    await making.begin(6)
    for number in range(5):
        await making.end(number)
        await making.clock.advance(0.25)

    assert making.began == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0]


async def test_a_rest_is_saved_up_only_as_far_as_may_be_under_way(making):
    await making.begin(1)
    await making.end(0)
    await making.clock.advance(1000)
    await making.begin(4)
    await making.end(1)
    await making.end(2)
    await making.clock.advance(0.25)

    assert making.began == [0.0, 1000.0, 1000.0, 1000.25]


async def test_nothing_begins_as_long_as_the_backend_limits_the_rate(making):
    await making.begin(4)
    await making.end(0, RateLimited("slowly", retry_after_s=7))
    await making.end(1)
    await making.clock.advance(6.9)
    assert len(making.began) == 2

    await making.clock.advance(0.2)

    assert making.began == [0.0, 0.0, 7.0, 7.0]
    with pytest.raises(RateLimited, match="slowly"):
        await making.tasks[0]


async def test_pauses_double_until_something_is_made_again():
    making = Making(at_once=1, per_s=1000.0)
    waits = []
    for number in range(8):
        asked_at = making.clock.monotonic() - 1000.0
        await making.begin(1)
        await making.clock.advance(LONGEST_CREATION_PAUSE_S)
        waits.append(making.began[-1] - asked_at)
        await making.end(number, RateLimited("slowly") if number < 7 else None)
        with pytest.raises(RateLimited) if number < 7 else pytest.MonkeyPatch.context():
            await making.tasks[number]
    assert waits == pytest.approx([0, 1, 2, 4, 8, 16, 32, 60])

    await making.begin(1)
    await making.end(8, RateLimited("slowly"))
    await making.begin(1)
    await making.clock.advance(1.0)

    assert len(making.began) == 10
    making.tasks[-1].cancel()
    await asyncio.gather(*making.tasks, return_exceptions=True)


async def test_several_that_are_told_together_are_told_once():
    making = Making(at_once=3)
    await making.begin(3)
    for number in range(3):
        await making.end(number, RateLimited("slowly"))
    await making.begin(1)
    await making.clock.advance(1.0)

    assert len(making.began) == 4
    making.tasks[-1].cancel()
    await asyncio.gather(*making.tasks, return_exceptions=True)


async def test_another_failure_is_no_reason_to_slow_down(making):
    await making.begin(3)
    await making.end(0, CreateFailed("no such image"))
    await making.clock.advance(0.25)

    assert making.began == [0.0, 0.0, 0.25]
    with pytest.raises(CreateFailed):
        await making.tasks[0]


class Busy(FakeBackend):
    """Says "not now" to its first creations."""

    def __init__(self, times):
        super().__init__()
        self.left = times

    async def before_agent(self, sandbox_id):
        if self.left:
            self.left -= 1
            raise RateLimited("429: slowly", retry_after_s=5)


async def test_a_backend_that_limits_the_rate_is_no_error_to_waiters():
    backend = Busy(2)
    harness = PoolsHarness({"default": PoolSpec(min_sandboxes=0, max_sandboxes=1, acquire_timeout_s=60)}, backend)
    await harness.start()
    waiting = asyncio.create_task(harness.pools.acquire(AcquireRequest(tenant="t", pool="default")))
    await settle()
    assert "slowly" in harness.pools.view("default").last_error
    await harness.clock.advance(9.9)
    assert not waiting.done()
    assert len(backend.handles) <= 1

    await harness.clock.advance(0.2)

    assert len((await waiting).leases) == 1
    assert harness.pools.view("default").last_error is None
    assert len(backend.created) == 3
    await harness.pools.stop()

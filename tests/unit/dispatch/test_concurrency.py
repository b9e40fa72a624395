"""The concurrency limiter: which calls get a permit, which wait, and that none is forgotten."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_server.core.errors import QuotaExceeded
from sandbox_server.dispatch.limits.concurrency import CallKey, ConcurrencyLimiter

A, B, C, D = (("lease-a", "1"), ("lease-b", "1"), ("lease-c", "1"), ("lease-c", "2"))


class LimiterHarness:
    """A limiter and the calls that wait for it."""

    def __init__(self, **most: int | None) -> None:
        self.most = most
        self.limiter = ConcurrencyLimiter(self.most.get)
        self.waiting: list[asyncio.Task[bool]] = []

    async def queue(self, key: CallKey, tenant: str = "t") -> asyncio.Task[bool]:
        """Start to wait for a permit."""
        assert not self.limiter.try_acquire_permit(tenant, key)
        task = asyncio.create_task(self.limiter.acquire_permit(tenant, key))
        self.waiting.append(task)
        await asyncio.sleep(0)
        return task

    async def settled(self) -> list[bool | None]:
        """What became of the calls that waited: True with a permit, False without one, None while they wait."""
        await asyncio.sleep(0)
        return [task.result() if task.done() else None for task in self.waiting]

    @property
    def is_empty(self) -> bool:
        return not self.limiter._calls_by_tenant and not self.limiter._waiting_by_lease


async def test_permits_are_given_in_the_order_of_arrival_and_no_more_than_the_limit() -> None:
    harness = LimiterHarness(t=1)
    assert harness.limiter.try_acquire_permit("t", A)
    for key in (B, C, D):
        await harness.queue(key)

    seen = []
    for key in (A, B, C, D):
        seen.append(await harness.settled())
        harness.limiter.release_permit("t", key)

    assert seen == [[None, None, None], [True, None, None], [True, True, None], [True, True, True]]
    assert harness.is_empty


async def test_no_call_overtakes_another_and_tenants_do_not_affect_each_other() -> None:
    harness = LimiterHarness(t=1, u=1)
    assert harness.limiter.try_acquire_permit("t", A)
    await harness.queue(B)

    assert harness.limiter.try_acquire_permit("u", A)
    assert harness.limiter.try_acquire_permit("free", C)
    assert harness.limiter.try_acquire_permit("free", D)
    harness.limiter.release_permit("t", A)
    await harness.queue(C)

    assert await harness.settled() == [True, None]


async def test_a_call_of_two_requests_takes_one_permit() -> None:
    harness = LimiterHarness(t=1)
    assert harness.limiter.try_acquire_permit("t", A)
    assert harness.limiter.try_acquire_permit("t", A)
    await harness.queue(B)
    await harness.queue(B)

    harness.limiter.release_permit("t", A)
    first = await harness.settled()
    harness.limiter.release_permit("t", A)
    second = await harness.settled()
    harness.limiter.release_permit("t", B)
    await harness.queue(C)

    assert (first, second) == ([None, None], [True, True])
    harness.limiter.release_permit("t", B)
    assert (await harness.settled())[-1] is True


async def test_a_cancelled_wait_delays_no_other_call() -> None:
    harness = LimiterHarness(t=1)
    assert harness.limiter.try_acquire_permit("t", A)
    gone, granted, last = [await harness.queue(key) for key in (B, C, D)]

    gone.cancel()
    await asyncio.wait([gone])
    harness.limiter.release_permit("t", A)
    granted.cancel()  # after its permit was given and before it ran
    await asyncio.wait([granted])

    assert await last
    harness.limiter.release_permit("t", D)
    assert harness.is_empty


async def test_calls_of_an_ended_lease_and_ended_calls_stop_waiting() -> None:
    harness = LimiterHarness(t=1)
    assert harness.limiter.try_acquire_permit("t", A)
    for key in (B, C, D):
        await harness.queue(key)

    harness.limiter.wake_waiters_of_lease("lease-c")
    harness.limiter.wake_waiters_of_lease("lease-nobody-knows")
    assert await harness.settled() == [None, False, False]
    harness.limiter.wake_waiters("t", B)

    assert await harness.settled() == [False, False, False]
    harness.limiter.release_permit("t", A)
    assert harness.is_empty


async def test_a_raised_limit_applies_at_once() -> None:
    harness = LimiterHarness(t=1)
    assert harness.limiter.try_acquire_permit("t", A)
    for key in (B, C, D):
        await harness.queue(key)

    harness.most["t"] = 2
    harness.limiter.apply_limits()
    raised = await harness.settled()
    harness.most["t"] = None
    harness.limiter.apply_limits()

    assert (raised, await harness.settled()) == ([True, None, None], [True, True, True])


async def test_as_many_calls_may_wait_as_may_run() -> None:
    harness = LimiterHarness(t=2)
    for key in (A, B):
        assert harness.limiter.try_acquire_permit("t", key)
    await harness.queue(C)
    harness.limiter.check_queue_room("t")
    await harness.queue(D)

    with pytest.raises(QuotaExceeded, match="2 calls of this tenant run and 2 wait for their turn, and its `max_running_calls` is 2") as refused:
        harness.limiter.check_queue_room("t")
    harness.limiter.check_queue_room("u")
    assert refused.value.extra == {"limit": "max_running_calls", "retry_after_s": 2}
    for task in harness.waiting:
        task.cancel()


STEPS = st.lists(st.tuples(st.sampled_from(["ask", "end", "leave", "lease_over", "limit"]), st.integers(0, 11)), max_size=60)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_no_permit_is_lost_or_given_twice_in_any_sequence(steps: list[tuple[str, int]]) -> None:
    asyncio.run(_any_sequence(steps))


async def _any_sequence(steps: list[tuple[str, int]]) -> None:
    keys = [(f"lease-{n % 3}", str(n)) for n in range(6)]
    most = {"t": 2}
    limiter = ConcurrencyLimiter(most.get)
    running: list[CallKey] = []
    waiting: list[tuple[CallKey, asyncio.Task[bool]]] = []
    for what, number in steps:
        key = keys[number % 6]
        if what == "ask":
            if limiter.try_acquire_permit("t", key):
                running.append(key)
            else:
                waiting.append((key, asyncio.create_task(limiter.acquire_permit("t", key))))
        elif what == "end" and running:
            limiter.release_permit("t", running.pop(number % len(running)))
        elif what == "leave" and waiting:
            waiting[number % len(waiting)][1].cancel()
        elif what == "lease_over":
            limiter.wake_waiters_of_lease(key[0])
        elif what == "limit":
            most["t"] = 1 + number % 3
            limiter.apply_limits()
        for _ in range(3):
            await asyncio.sleep(0)
        running += [key for key, task in waiting if task.done() and not task.cancelled() and task.result()]
        waiting = [(key, task) for key, task in waiting if not task.done()]
        line = limiter._calls_by_tenant.get("t")
        assert sorted(line.running.elements() if line is not None else ()) == sorted(running)
        assert set(line.waiting if line is not None else ()) == {key for key, _ in waiting}
        assert not waiting or len(set(running)) >= most["t"], "a place is free and somebody waits"
        assert not set(running) & {key for key, _ in waiting}
    for key in running:
        limiter.release_permit("t", key)
    for _, task in waiting:
        task.cancel()
    await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
    for key, task in waiting:
        if not task.cancelled():
            limiter.release_permit("t", key)
    assert not limiter._calls_by_tenant
    assert not limiter._waiting_by_lease

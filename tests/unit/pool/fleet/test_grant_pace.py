"""Acquires of ready slots are granted a few at a time, so that the commands of hundreds of clients do not all begin together."""

from __future__ import annotations

import asyncio

import pytest

from sandbox_server.backends.base import BackendTraits
from sandbox_server.core.errors import LeaseLost, NoCapacity
from sandbox_server.core.types import AcquireRequest
from sandbox_server.pool.fleet.supervision.grant_pace import COUNTED_S, MAX_PERIODS, GrantPace
from sandbox_server.testing import FakeAgent, FakeBackend, FakeClock, settle


class Acquiring:
    """Acquires that pass when the pace lets them."""

    def __init__(self, at_once=2):
        self.clock = FakeClock()
        self.pace = GrantPace(at_once, self.clock)
        self.passed = []
        self.turns = {}
        self.tasks = {}
        self.free_slots = 100

    async def ask(self, *names, wait_s=60.0, priority=0):
        for name in names:
            self.tasks[name] = asyncio.create_task(self.acquire(name, wait_s, priority))
        await settle()

    async def acquire(self, name, wait_s, priority):
        self.turns[name] = await self.pace.wait_for_turn(name[0], lambda: self.free_slots > 0, wait_s=wait_s, priority=priority)
        self.passed.append(name)


@pytest.fixture
async def acquiring():
    made = Acquiring()
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_a_few_at_a_time_in_the_order_in_which_they_came(acquiring):
    await acquiring.ask("a", "b", "c", "d", "e")
    assert acquiring.passed == ["a", "b"]

    await acquiring.clock.advance(COUNTED_S)
    assert acquiring.passed == ["a", "b", "c", "d"]
    await acquiring.clock.advance(COUNTED_S)

    assert acquiring.passed == ["a", "b", "c", "d", "e"]


async def test_acquires_wait_for_calls_that_run_but_not_for_long(acquiring):
    await acquiring.ask("a", "b", "c", "d")
    acquiring.turns["a"].runs_call = lambda: True
    await acquiring.clock.advance(COUNTED_S)
    assert acquiring.passed == ["a", "b", "c"], "the command of a is still running"

    acquiring.turns["c"].runs_call = lambda: True
    await acquiring.clock.advance((MAX_PERIODS - 2) * COUNTED_S)
    assert acquiring.passed == ["a", "b", "c"]
    await acquiring.clock.advance(COUNTED_S)

    assert acquiring.passed == ["a", "b", "c", "d"], "a command may run for hours"


async def test_an_acquire_without_a_free_slot_waits_for_a_slot_instead(acquiring):
    await acquiring.ask("a", "b", "c", "d")
    acquiring.free_slots = 0

    await acquiring.ask("e")
    assert acquiring.passed == ["a", "b", "e"]
    await acquiring.clock.advance(COUNTED_S)

    assert acquiring.passed == ["a", "b", "e", "c", "d"]


async def test_the_tenants_take_turns(acquiring):
    """A tenant that sends many acquires delays one acquire of another tenant by one turn."""
    await acquiring.ask("t1", "t2", "t3", "t4", "t5", "u1", "u2")

    await acquiring.clock.advance(COUNTED_S)
    assert acquiring.passed == ["t1", "t2", "t3", "u1"]
    await acquiring.clock.advance(COUNTED_S)

    assert acquiring.passed == ["t1", "t2", "t3", "u1", "t4", "u2"]


async def test_the_acquires_of_a_tenant_take_their_turns_by_priority_and_then_in_the_order_in_which_they_came(acquiring):
    await acquiring.ask("t1", "t2", "t3", "t4")
    await acquiring.ask("t5", "t6", priority=1)

    await acquiring.clock.advance(COUNTED_S)
    await acquiring.clock.advance(COUNTED_S)

    assert acquiring.passed == ["t1", "t2", "t5", "t6", "t3", "t4"]


async def test_an_acquire_passes_at_the_end_of_its_wait_and_takes_no_turn(acquiring):
    await acquiring.ask("t1", "t2")
    await acquiring.ask("t3", wait_s=COUNTED_S / 2)
    await acquiring.ask("t4", "t5")
    await acquiring.ask("t6", wait_s=0)

    await acquiring.clock.advance(COUNTED_S / 2)
    assert acquiring.passed == ["t1", "t2", "t6", "t3"]
    await acquiring.clock.advance(COUNTED_S / 2)

    assert acquiring.passed == ["t1", "t2", "t6", "t3", "t4", "t5"]


async def test_an_acquire_that_is_cancelled_at_the_end_of_its_wait_gives_no_turn_to_another(acquiring):
    await acquiring.ask("t1", "t2")
    await acquiring.ask("t3", wait_s=COUNTED_S / 2)
    await acquiring.ask("t4", "t5")
    acquiring.clock.call_later(COUNTED_S / 2, acquiring.tasks["t3"].cancel)  # after the timer of its wait, in the same turn of the event loop

    await acquiring.clock.advance(COUNTED_S / 2)

    assert acquiring.passed == ["t1", "t2"]


async def test_an_acquire_that_is_cancelled_gives_its_turn_to_the_next(acquiring):
    await acquiring.ask("t1", "t2", "t3", "t4", "t5", "t6")
    acquiring.tasks["t3"].cancel()
    await settle()

    await acquiring.clock.advance(COUNTED_S)

    assert acquiring.passed == ["t1", "t2", "t4", "t5"]


async def test_without_a_limit_every_acquire_passes_at_once():
    acquiring = Acquiring(at_once=None)

    await acquiring.ask("a", "b", "c")

    assert acquiring.passed == ["a", "b", "c"]


@pytest.fixture
async def paced(make_harness):
    """A pool of eight ready slots whose backend lets two acquires pass at a time."""

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return FakeAgent(sandbox_id, slots=8)

    backend = Backend()
    backend.traits = BackendTraits(acquires_at_once=2)
    return await make_harness(backend, max_sandboxes=1, slots_per_sandbox=8)


async def test_only_acquires_that_may_wait_are_paced(paced):
    tasks = [await paced.queue() for _ in range(4)]
    assert [task.done() for task in tasks] == [True, True, False, False]

    assert (await paced.acquire(wait_s=0)).leases
    await paced.clock.advance(COUNTED_S)

    assert all(task.done() for task in tasks)
    assert paced.slots() == {"leased": 5, "ready": 3}


async def test_the_wait_for_a_turn_is_part_of_the_wait_of_an_acquire(paced):
    """At the end of `wait_s` it is granted a slot that is free, or is refused if none is."""
    assert all(task.done() for task in [await paced.queue() for _ in range(2)])
    granted = await paced.queue(wait_s=COUNTED_S / 4)
    refused = await paced.queue(wait_s=COUNTED_S / 2)
    refused_later = await paced.queue(wait_s=COUNTED_S * 2)

    await paced.clock.advance(COUNTED_S / 4)
    assert granted.result().waited_s == pytest.approx(COUNTED_S / 4)
    await paced.acquire(count=5, wait_s=0)
    await paced.clock.advance(COUNTED_S / 4)
    assert refused.done()
    await paced.clock.advance(COUNTED_S)
    assert not refused_later.done()
    await paced.clock.advance(COUNTED_S / 2)

    for task, wait_s in (refused, COUNTED_S / 2), (refused_later, COUNTED_S * 2):
        with pytest.raises(NoCapacity) as refusal:
            task.result()
        assert refusal.value.extra["waited_s"] == pytest.approx(wait_s)
    assert paced.slots() == {"leased": 8}


async def test_a_request_key_that_is_released_while_its_acquire_waits_for_its_turn_leases_nothing(paced):
    first = [await paced.queue() for _ in range(2)]
    waiting = asyncio.create_task(paced.pools.acquire(AcquireRequest(tenant="t", pool="default", request_key="k")))
    await settle()
    paced.pools.release("t", [], request_key="k")

    await paced.clock.advance(COUNTED_S)

    with pytest.raises(LeaseLost):
        await waiting
    assert paced.slots() == {"leased": len(first), "ready": 6}

"""Resets on one machine begin a few at a time, so that commands do not have to share the processors with all of them."""

from __future__ import annotations

import asyncio
import functools

import pytest

from sandbox_server.backends.base import BackendTraits
from sandbox_server.pool.fleet.supervision.reset_budget import COUNTED_S, MAX_OVERTAKEN_S, ResetBudget, WaitingReset, choose_next_reset
from sandbox_server.testing import FakeAgent, FakeBackend, FakeClock, settle


class Resetting:
    """Resets that begin when the budget lets them, and end when the test does."""

    def __init__(self, at_once=2):
        self.clock = FakeClock()
        self.budget = ResetBudget(at_once, self.clock, self.clock)
        self.began = []
        self.ends = {}
        self.tasks = {}
        self.wanted_pools = set()
        self.is_wanted = {name: functools.partial(self.wanted_pools_have, name) for name in "abc"}

    def wanted_pools_have(self, pool):
        return pool in self.wanted_pools

    async def ask(self, *names):
        for name in names:
            self.tasks[name] = asyncio.create_task(self.reset(name))
        await settle()

    async def reset(self, name):
        async with self.budget.reserve_reset(self.is_wanted[name[0]]):
            self.began.append(name)
            self.ends[name] = asyncio.get_running_loop().create_future()
            await self.ends[name]

    async def end(self, name):
        self.ends[name].set_result(None)
        await settle()

    async def cancel(self, name):
        self.tasks[name].cancel()
        await settle()


@pytest.fixture
async def resetting():
    made = Resetting()
    yield made
    for task in made.tasks.values():
        task.cancel()
    await asyncio.gather(*made.tasks.values(), return_exceptions=True)


async def test_so_many_at_once_in_the_order_in_which_they_came(resetting):
    await resetting.ask("a1", "a2", "a3", "a4")
    assert resetting.began == ["a1", "a2"]

    await resetting.end("a2")
    await resetting.end("a1")

    assert resetting.began == ["a1", "a2", "a3", "a4"]


async def test_a_reset_that_an_acquire_waits_for_begins_first(resetting):
    await resetting.ask("a1", "a2", "a3", "a4", "b1", "b2")
    resetting.wanted_pools = {"b"}  # an acquire that came after all of them

    await resetting.end("a1")
    await resetting.end("a2")
    await resetting.end("b1")

    assert resetting.began == ["a1", "a2", "b1", "b2", "a3"]


async def test_a_reset_that_has_waited_for_long_takes_turns_with_those_that_acquires_wait_for():
    """The processes of an ended lease run until its slot is reset."""
    unwanted, wanted = WaitingReset(100.0, lambda: False), WaitingReset(100.2, lambda: True)
    soon, late = 100.0 + MAX_OVERTAKEN_S / 2, 100.0 + MAX_OVERTAKEN_S

    assert choose_next_reset([unwanted, wanted], soon, was_overtaken=True) is wanted
    assert choose_next_reset([unwanted, wanted], late, was_overtaken=True) is unwanted
    assert choose_next_reset([unwanted, wanted], late, was_overtaken=False) is wanted
    assert choose_next_reset([], late, was_overtaken=True) is None


async def test_many_resets_of_one_pool_do_not_delay_those_that_another_pool_waits_for(resetting):
    await resetting.ask(*(f"a{number}" for number in range(20)))
    await resetting.clock.advance(COUNTED_S)  # the first two count no longer
    resetting.wanted_pools = {"b"}
    await resetting.ask("b1", "b2", "b3")
    resetting.began.clear()
    await resetting.clock.advance(COUNTED_S)
    assert resetting.began == ["b1", "b2"]
    await resetting.clock.advance(MAX_OVERTAKEN_S)

    assert resetting.began[2:6] == ["b3", "a4", "a5", "a6"]


async def test_the_pools_whose_resets_acquires_wait_for_take_turns(resetting):
    """A tenant whose slots are slow to reset delays a reset of another pool by one turn, however many it has and however long they wait."""
    resetting.wanted_pools = {"a", "b"}
    await resetting.ask(*(f"a{number}" for number in range(30)))
    await resetting.clock.advance(MAX_OVERTAKEN_S)
    resetting.began.clear()
    await resetting.ask("b1", "b2", "b3", "c1")

    await resetting.clock.advance(3 * COUNTED_S)

    assert resetting.began == ["a22", "b1", "a23", "b2", "a24", "b3"]


async def test_a_reset_that_no_acquire_waits_for_has_its_turn_however_many_pools_have_waiting_acquires():
    wanted = [WaitingReset(101.0, lambda: True), WaitingReset(100.0, lambda: True)]
    unwanted = WaitingReset(100.5, lambda: False)
    late = 100.5 + MAX_OVERTAKEN_S

    assert choose_next_reset([*wanted, unwanted], late, was_overtaken=False) is wanted[0]
    assert choose_next_reset([*wanted, unwanted], late, was_overtaken=True) is unwanted
    assert choose_next_reset([unwanted], late, was_overtaken=False) is unwanted


async def test_a_slow_reset_delays_no_other_for_long(resetting):
    """A slot can make its own reset slow. The resets of other slots go on."""
    await resetting.ask("a1", "a2", "b1", "b2", "b3")

    await resetting.clock.advance(COUNTED_S)
    assert resetting.began == ["a1", "a2", "b1", "b2"]
    await resetting.end("a1")  # it counts no longer, so its end gives no place free
    assert resetting.began == ["a1", "a2", "b1", "b2"]
    await resetting.end("b1")

    assert resetting.began == ["a1", "a2", "b1", "b2", "b3"]


async def test_a_reset_that_is_cancelled_gives_its_place_to_the_next(resetting):
    await resetting.ask("a1", "a2", "a3", "a4", "a5")

    await resetting.cancel("a3")
    await resetting.cancel("a1")
    resetting.ends["a2"].set_result(None)
    resetting.tasks["a5"].cancel()  # in the turn of the event loop in which it could begin
    await settle()
    await resetting.end("a4")
    await resetting.ask("b1", "b2")

    assert resetting.began == ["a1", "a2", "a4", "b1", "b2"]


async def test_without_a_limit_every_reset_begins_at_once():
    resetting = Resetting(at_once=None)

    await resetting.ask("a1", "a2", "a3")
    for name in ("a1", "a2", "a3"):
        await resetting.end(name)

    assert resetting.began == ["a1", "a2", "a3"]


async def test_the_pools_of_a_backend_share_its_limit(make_harness):
    """All slots of a released gang are clean in the end, though their agent is asked to reset only so many at once."""
    most = 0

    class Counting(FakeAgent):
        def respond(self, meta, say):
            nonlocal most
            if meta["op"] == "reset":
                waiting.append((meta, say))
                most = max(most, len(waiting))
            else:
                super().respond(meta, say)

    class Backend(FakeBackend):
        def make_agent(self, pool, spec, sandbox_id):
            return Counting(sandbox_id, slots=8)

    waiting = []
    backend = Backend()
    backend.traits = BackendTraits(resets_at_once=2)
    harness = await make_harness(backend, max_sandboxes=1, slots_per_sandbox=8)
    gang = (await harness.acquire(count=8)).leases
    harness.pools.release("t", [lease.lease_id for lease in gang])
    await settle()
    (agent,) = backend.agents.values()
    for _ in gang:
        meta, say = waiting.pop(0)
        FakeAgent.respond(agent, meta, say)
        await settle()

    assert most == 2
    assert harness.slots() == {"ready": 8}

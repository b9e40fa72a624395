"""What a backend is asked, how often, and what happens to sandboxes while its control plane cannot be asked."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from sandbox_server.backends.base import BackendTraits, Observation, ObservedState
from sandbox_server.core.errors import BackendUnavailable, SandboxLost
from sandbox_server.core.types import Handle, PoolSpec
from sandbox_server.pool.fleet.supervision.observer import LONGEST_OBSERVE_PAUSE_S, BackendObserver
from sandbox_server.testing import FakeBackend, FakeClock, settle
from tests.unit.pool.conftest import PoolsHarness


class Partitioned(FakeBackend):
    """A backend whose agents cannot be reached over the network while `partitioned` is set."""

    partitioned = False

    async def connect(self, endpoint, timeout_s=10.0):
        return await super().connect(replace(endpoint, address="fake:nobody") if self.partitioned else endpoint, timeout_s)

    def cut_links(self):
        self.partitioned = True
        for agent in self.agents.values():
            agent.hang_up()


def handles(count):
    return [Handle(backend="local", pool="p", owner="local", sandbox_id=f"s-{number}", address=f"fake:s-{number}") for number in range(count)]


@pytest.mark.parametrize("error", [OSError("connection refused"), BackendUnavailable("503")])
async def test_a_control_plane_that_is_away_for_a_minute_kills_nothing(make_harness, error):
    harness = await make_harness(Partitioned(), min_sandboxes=2)
    leases = (await harness.acquire(count=4, ttl_s=1000)).leases
    harness.backend.unreachable = error
    harness.backend.cut_links()

    await harness.clock.advance(60)
    assert harness.sandboxes() == {"ready": 2}
    with pytest.raises(BackendUnavailable):
        harness.pools.locate_slot("t", leases[0].lease_id)
    harness.backend.partitioned, harness.backend.unreachable = False, None
    await harness.clock.advance(1)

    assert [harness.pools.locate_slot("t", lease.lease_id).lease.lease_id for lease in leases] == [lease.lease_id for lease in leases]
    assert harness.backend.destroyed == []
    assert len(harness.backend.created) == 2


async def test_a_sandbox_that_answers_is_kept_although_its_backend_cannot_be_asked(make_harness):
    harness = await make_harness(max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases
    harness.backend.unreachable = OSError("away")

    harness.backend.agents[lease.sandbox_id].hang_up()
    await settle()

    assert harness.pools.locate_slot("t", lease.lease_id).lease.lease_id == lease.lease_id
    harness.backend.unreachable = None  # otherwise the end of the pools waits for it


async def test_an_unreachable_sandbox_is_lost_once_its_backend_says_that_it_is_gone(make_harness):
    harness = await make_harness(Partitioned(), max_sandboxes=1)
    (lease,) = (await harness.acquire(ttl_s=1000)).leases
    harness.backend.unreachable = OSError("away")
    harness.backend.cut_links()
    await harness.clock.advance(60)
    harness.backend.kill(lease.sandbox_id)
    harness.backend.unreachable = None

    await harness.clock.advance(LONGEST_OBSERVE_PAUSE_S + 1)

    with pytest.raises(SandboxLost, match="its agent has ended"):
        harness.pools.locate_slot("t", lease.lease_id)


async def test_an_unreachable_sandbox_is_lost_when_its_backend_says_that_it_runs_and_the_time_is_over(make_harness):
    harness = await make_harness(Partitioned(), max_sandboxes=1)
    (lease,) = (await harness.acquire(ttl_s=1000)).leases
    harness.backend.unreachable = OSError("away")
    harness.backend.cut_links()
    await harness.clock.advance(60)
    harness.backend.unreachable = None

    await harness.clock.advance(LONGEST_OBSERVE_PAUSE_S + 1)

    with pytest.raises(SandboxLost, match="could not be reached for 5 s"):
        harness.pools.locate_slot("t", lease.lease_id)


async def test_how_long_a_silent_sandbox_is_given_is_a_trait_of_its_backend(make_harness):
    backend = Partitioned()
    backend.traits = BackendTraits(lost_after_s=60)
    harness = await make_harness(backend, max_sandboxes=1)
    (lease,) = (await harness.acquire(ttl_s=1000)).leases
    backend.cut_links()

    await harness.clock.advance(59)
    with pytest.raises(BackendUnavailable):
        harness.pools.locate_slot("t", lease.lease_id)
    await harness.clock.advance(2)

    with pytest.raises(SandboxLost, match="for 60 s"):
        harness.pools.locate_slot("t", lease.lease_id)


async def test_a_backend_that_cannot_destroy_now_is_asked_again(make_harness):
    harness = await make_harness(min_sandboxes=0, max_sandboxes=1)
    (lease,) = (await harness.acquire()).leases
    harness.backend.unreachable = BackendUnavailable("503")
    await harness.pools.drain_sandbox(lease.sandbox_id)
    harness.pools.release("t", [lease.lease_id])
    await harness.clock.advance(30)
    assert harness.sandboxes() == {"draining": 1}

    harness.backend.unreachable = None
    await harness.clock.advance(11)

    assert harness.backend.destroyed == [lease.sandbox_id]


async def test_fifty_sandboxes_ask_one_question_at_a_time():
    backend = Partitioned()
    harness = PoolsHarness({"default": PoolSpec(slots_per_sandbox=1, min_sandboxes=50, max_sandboxes=50)}, backend)
    await harness.start()
    await harness.clock.advance(10)
    assert harness.sandboxes() == {"ready": 50}
    assert backend.observed == []
    backend.unreachable = OSError("away")

    backend.cut_links()
    await settle()
    assert [len(asked) for asked in backend.observed] == [50]
    await harness.clock.advance(60)

    assert {len(asked) for asked in backend.observed} == {50}
    assert len(backend.observed) < 12, "the pauses between failed questions grow"
    assert harness.sandboxes() == {"ready": 50}
    backend.partitioned, backend.unreachable = False, None
    await harness.pools.stop()


async def test_questions_are_batched_and_keep_their_distance():
    clock, backend = FakeClock(), FakeBackend()
    observer = BackendObserver(backend, clock, clock)

    first = [observer.request_observation(handle) for handle in handles(3)]
    await settle()
    second = [observer.request_observation(handle) for handle in handles(2)]
    await settle()

    assert [future.result().state for future in first] == [ObservedState.GONE] * 3
    assert not any(future.done() for future in second)
    await clock.advance(backend.traits.observe_interval_s)
    assert all(future.done() for future in second)
    assert backend.observed == [["s-0", "s-1", "s-2"], ["s-0", "s-1"]]
    await observer.stop_asking()


async def test_a_question_that_nobody_waits_for_is_not_asked():
    clock, backend = FakeClock(), FakeBackend()
    observer = BackendObserver(backend, clock, clock)

    observer.request_observation(handles(1)[0]).cancel()
    await settle()

    assert backend.observed == []


async def test_a_fault_of_the_backend_is_no_statement_about_its_sandboxes():
    class Faulty(FakeBackend):
        async def observe(self, handles):
            raise ZeroDivisionError("a bug")

    clock = FakeClock()
    observer = BackendObserver(Faulty(), clock, clock)

    observation = await observer.request_observation(handles(1)[0])

    assert observation.state is ObservedState.UNKNOWN
    assert "ZeroDivisionError" in observation.detail


async def test_a_change_that_the_backend_reports_by_itself_answers_at_once():
    class Watching(FakeBackend):
        def __init__(self):
            super().__init__()
            self.changes = asyncio.Queue()

        async def watch(self):
            while True:
                yield await self.changes.get()

    clock, backend = FakeClock(), Watching()
    backend.unreachable = OSError("away")
    observer = BackendObserver(backend, clock, clock)
    (handle,) = handles(1)
    assert (await observer.request_observation(handle)).state is ObservedState.UNKNOWN

    answer = observer.request_observation(handle)
    backend.changes.put_nowait({handle.sandbox_id: Observation(state=ObservedState.GONE, detail="stopped")})
    await settle()

    assert answer.result().detail == "stopped"
    await observer.stop_asking()


async def test_a_fault_in_watching_is_logged_and_watching_starts_again_after_a_pause(caplog):
    class FailingOnce(FakeBackend):
        def __init__(self):
            super().__init__()
            self.watch_count = 0
            self.changes = asyncio.Queue()

        async def watch(self):
            self.watch_count += 1
            if self.watch_count == 1:
                raise KeyError("no such field")
            while True:
                yield await self.changes.get()

    clock, backend = FakeClock(), FailingOnce()
    backend.unreachable = OSError("away")
    observer = BackendObserver(backend, clock, clock)
    (handle,) = handles(1)
    with caplog.at_level(logging.ERROR):
        assert (await observer.request_observation(handle)).state is ObservedState.UNKNOWN
        await settle()
    (record,) = caplog.records
    assert record.message == "watching sandboxes failed; the backend is asked instead"
    assert isinstance(record.exc_info[1], KeyError)

    observer.request_observation(handle)
    await settle()
    assert backend.watch_count == 1
    await clock.advance(LONGEST_OBSERVE_PAUSE_S)
    assert (await observer.request_observation(handle)).state is ObservedState.UNKNOWN
    answer = observer.request_observation(handle)
    backend.changes.put_nowait({handle.sandbox_id: Observation(state=ObservedState.GONE, detail="stopped")})
    await settle()

    assert backend.watch_count == 2
    assert answer.result().detail == "stopped"
    await observer.stop_asking()


async def ending_harness(make_harness, life_s, **spec):
    """A harness whose backend ends its first sandbox after `life_s` seconds, and each further one as much later."""

    class Ending(FakeBackend):
        async def before_agent(self, sandbox_id):
            self.ends_at[sandbox_id] = FakeClock().wall() + life_s * len(self.created)

    backend = Ending()
    backend.traits = BackendTraits(ends_sandboxes=True)
    return await make_harness(backend, max_sandboxes=2, **spec)


async def test_leases_carry_the_end_of_their_sandbox_and_never_outlive_it(make_harness):
    harness = await ending_harness(make_harness, 1000, min_lease_life_s=300)
    ends_at = harness.clock.wall() + 1000

    (lease,) = (await harness.acquire(ttl_s=5000)).leases
    assert (lease.sandbox_ends_at, lease.expires_at) == pytest.approx((ends_at, ends_at))
    assert harness.pools.sandboxes()[0].ends_at == pytest.approx(ends_at)
    (renewed,), _ = harness.pools.renew("t", [lease.lease_id], 9000)
    assert renewed.expires_at == pytest.approx(ends_at)
    harness.pools.record_call_start(lease.lease_id)
    await harness.clock.advance(999)
    assert harness.pools.lease("t", lease.lease_id)
    await harness.clock.advance(2)

    with pytest.raises(SandboxLost, match="its backend ends it now"):
        harness.pools.lease("t", lease.lease_id)


async def test_a_sandbox_with_too_little_life_left_gives_no_new_leases(make_harness):
    harness = await ending_harness(make_harness, 1000, min_lease_life_s=300, idle_timeout_s=5000)
    (first,) = (await harness.acquire(ttl_s=1000)).leases
    await harness.clock.advance(701)

    (second,) = (await harness.acquire()).leases

    assert second.sandbox_id != first.sandbox_id
    assert harness.pools.lease("t", first.lease_id)


async def test_a_backend_whose_sandboxes_live_too_short_for_the_spec_is_a_permanent_error(make_harness):
    harness = await ending_harness(make_harness, 1000, min_lease_life_s=2000)
    await harness.clock.advance(10)

    assert "min_lease_life_s is 2000" in harness.pools.view("default").last_error
    assert len(harness.backend.created) == 1

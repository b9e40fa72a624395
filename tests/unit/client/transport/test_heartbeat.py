"""Tests of the heartbeat: leases are renewed in time, and their holders are notified of renewals and losses."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from env_client.discovery import Endpoint
from env_client.errors import ConnectFailed, LeaseLost, SandboxError, SandboxLost, ServiceError
from env_client.retry import RetryPolicy
from env_client.transport.heartbeat import MAX_LEASES_OF_RENEWAL, AsyncHeartbeat, RenewalBatch, RenewalSchedule, ThreadHeartbeat
from env_client.transport.request_core import RequestCore
from env_client.transport.senders import AsyncSender, SyncSender
from env_client.values import LeaseInfo, Renewed
from tests.support.scripted_responses import URL, FakeTime, Script, a_lease


class Holder:
    """A lease that records its notifications."""

    def __init__(self, lease_id: str = "l-1") -> None:
        self.lease_id = lease_id
        self.notifications: list[Any] = []

    def record_renewal(self, info: LeaseInfo) -> None:
        self.notifications.append(info.lease_id)

    def record_loss(self, error: ServiceError) -> None:
        self.notifications.append(error)

    def record_renewal_error(self, error: SandboxError) -> None:
        self.notifications.append(error)


def renewed(*lease_ids: str, **lost: ServiceError) -> Renewed:
    return Renewed(leases=tuple(LeaseInfo(lease_id=lease_id) for lease_id in lease_ids), lost=lost)


#: A batch for outcomes that do not depend on it.
BATCH = RenewalBatch(("l-1",), 300)


class TestRenewalSchedule:
    def test_a_lease_is_due_at_a_third_of_its_ttl(self) -> None:
        schedule = RenewalSchedule()
        schedule.add_lease(Holder(), 300, now_s=0)

        assert (schedule.next_due_s(), schedule.take_due_batches(99.9)) == (100, [])
        assert [batch.lease_ids for batch in schedule.take_due_batches(100)] == [("l-1",)]

    def test_a_renewed_lease_is_due_a_third_later(self) -> None:
        schedule, holder = RenewalSchedule(), Holder()
        schedule.add_lease(holder, 300, now_s=0)
        schedule.take_due_batches(100)
        schedule.record_outcome(BATCH, renewed("l-1"), now_s=101)

        assert (schedule.next_due_s(), holder.notifications) == (201, ["l-1"])

    def test_those_due_soon_go_with_those_due_now(self) -> None:
        schedule = RenewalSchedule()
        for lease_id, now_s in (("a", 0), ("b", 20), ("c", 90)):
            schedule.add_lease(Holder(lease_id), 300, now_s)

        assert [batch.lease_ids for batch in schedule.take_due_batches(100)] == [("a", "b")]

    def test_a_ttl_has_a_request_of_its_own_and_many_leases_have_several(self) -> None:
        schedule = RenewalSchedule()
        for number in range(MAX_LEASES_OF_RENEWAL + 1):
            schedule.add_lease(Holder(f"l-{number}"), 30, 0)
        schedule.add_lease(Holder("other"), 60, 0)

        assert [(len(batch.lease_ids), batch.ttl_s) for batch in schedule.take_due_batches(20)] == [(MAX_LEASES_OF_RENEWAL, 30), (1, 30), (1, 60)]

    def test_a_lost_lease_is_notified_and_not_renewed_again(self) -> None:
        schedule, holder, error = RenewalSchedule(), Holder("x"), LeaseLost("expired")
        schedule.add_lease(holder, 300, 0)
        schedule.record_outcome(BATCH, renewed(x=error), 100)

        assert (holder.notifications, schedule.next_due_s()) == ([error], None)

    def test_one_that_got_no_answer_is_due_again_soon(self) -> None:
        schedule, holder, error = RenewalSchedule(), Holder(), ConnectFailed()
        schedule.add_lease(holder, 300, 0)
        (batch,) = schedule.take_due_batches(100)
        schedule.record_outcome(batch, error, 100)

        assert (holder.notifications, schedule.next_due_s()) == ([error], 105)

    def test_one_that_the_answer_forgot_is_due_again_soon(self) -> None:
        schedule = RenewalSchedule()
        schedule.add_lease(Holder(), 12, 0)
        schedule.take_due_batches(4)
        schedule.record_outcome(BATCH, renewed(), 4)

        assert schedule.next_due_s() == 5

    def test_one_that_is_let_go_is_forgotten_even_by_a_late_answer(self) -> None:
        schedule, holder = RenewalSchedule(), Holder()
        schedule.add_lease(holder, 300, 0)
        (batch,) = schedule.take_due_batches(100)
        schedule.remove_leases(["l-1"])
        schedule.record_outcome(batch, renewed("l-1"), 101)
        schedule.record_outcome(batch, ConnectFailed(), 101)

        assert (holder.notifications, schedule.next_due_s()) == ([], None)


@pytest.mark.parametrize(("error", "warnings"), [(ConnectFailed(), 0), (SandboxError("refused"), 2)])
def test_failing_renewals_are_logged_once_until_one_succeeds(error: SandboxError, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    schedule = RenewalSchedule()
    schedule.add_lease(Holder(), 300, 0)
    for _ in range(2):
        for now_s in (100, 105, 110):
            for batch in schedule.take_due_batches(now_s):
                schedule.record_outcome(batch, error, now_s)
        schedule.record_outcome(BATCH, renewed("l-1"), 0)

    assert [record.levelname for record in caplog.records].count("WARNING") == warnings


async def test_an_outage_is_logged_once_for_all_requests(core: RequestCore, script: Script, fake_time: FakeTime, caplog: pytest.LogCaptureFixture) -> None:
    heartbeat = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock)
    script.steps = [*[httpx.ConnectError("refused")] * 3, httpx.Response(200, json={"leases": [a_lease()], "lost": []})]
    heartbeat.add_lease(Holder(), 300)
    for wait_s in (100, 5, 5, 5):
        fake_time.now_s += wait_s
        await heartbeat.renew_due_leases()
    await heartbeat.stop_renewals()

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(",")[0] for line in told] == [f"no response from {URL}", f"{URL} responds again after 15.0 s"]


@pytest.fixture
def core(fake_time: FakeTime) -> RequestCore:
    return RequestCore(Endpoint(URL, None), RetryPolicy(total_s=0), clock=fake_time.clock)


async def test_the_task_renews_what_is_due_and_ends_with_the_last_lease(core: RequestCore, script: Script, fake_time: FakeTime) -> None:
    heartbeat, holder = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock), Holder()
    script.steps = [httpx.Response(200, json={"leases": [], "lost": [{"lease_id": "l-1", "code": "lease_lost", "detail": "expired"}]})]
    heartbeat.add_lease(holder, 300)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "sandbox-heartbeat"]
    fake_time.now_s += 100
    await task

    assert script.bodies() == [{"lease_ids": ["l-1"], "ttl_s": 300}]
    assert [type(notification) for notification in holder.notifications] == [LeaseLost]


async def test_the_task_starts_again_and_ends_when_closed(core: RequestCore, script: Script, fake_time: FakeTime) -> None:
    heartbeat = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock)
    heartbeat.add_lease(Holder(), 300)
    heartbeat.remove_leases(["l-1"])
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await task
    heartbeat.add_lease(Holder(), 300)
    await heartbeat.stop_renewals()

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_renewal_that_fails_is_surfaced_and_tried_again(core: RequestCore, script: Script, fake_time: FakeTime) -> None:
    heartbeat, holder = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock), Holder()
    script.steps = [httpx.ConnectError("refused"), httpx.Response(200, json={"leases": [a_lease()], "lost": []})]
    heartbeat.add_lease(holder, 300)
    fake_time.now_s += 100
    await heartbeat.renew_due_leases()
    fake_time.now_s += 5
    await heartbeat.renew_due_leases()
    await heartbeat.stop_renewals()

    assert isinstance(holder.notifications[0], ConnectFailed)
    assert holder.notifications[1:] == ["l-1"]


def test_the_thread_renews_what_is_due_and_ends_with_the_last_lease(core: RequestCore, script: Script, fake_time: FakeTime) -> None:
    heartbeat, holder, threads, looked = ThreadHeartbeat(SyncSender(core, httpx.MockTransport(script)), fake_time.clock), Holder(), [], threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        threads.append(threading.current_thread())
        looked.set()
        return httpx.Response(200, json={"leases": [], "lost": [{"lease_id": "l-1", "code": "sandbox_lost"}]})

    script.steps = [answer]
    heartbeat.add_lease(holder, -1)  # due at once
    assert looked.wait(30)
    (thread,) = threads
    thread.join(30)

    assert not thread.is_alive()
    assert thread.daemon
    assert script.bodies() == [{"lease_ids": ["l-1"], "ttl_s": -1}]
    assert [type(notification) for notification in holder.notifications] == [SandboxLost]


def test_the_thread_ends_when_closed(core: RequestCore, script: Script, fake_time: FakeTime) -> None:
    heartbeat = ThreadHeartbeat(SyncSender(core, httpx.MockTransport(script)), fake_time.clock)
    heartbeat.add_lease(Holder(), 300)
    heartbeat.stop_renewals()

    assert "sandbox-heartbeat" not in [thread.name for thread in threading.enumerate()]

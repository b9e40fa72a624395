"""Leases are renewed in time, and a lost one is told to whoever holds it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from env_client.discovery import Endpoint
from env_client.errors import ConnectFailed, LeaseLost, SandboxError, SandboxLost, ServiceError
from env_client.retry import RetryPolicy
from env_client.transport.heartbeat import BATCH, AsyncHeartbeat, HeartbeatBook, ThreadHeartbeat
from env_client.transport.sending import AsyncSender, Sender, SyncSender
from env_client.values import LeaseInfo, Renewed
from tests.support.scripted_service import URL, FakeTime, Script, a_lease


class Holder:
    """Somebody who holds a lease."""

    def __init__(self, lease_id: str = "l-1") -> None:
        self.lease_id = lease_id
        self.heard: list[Any] = []

    def renewed(self, info: LeaseInfo) -> None:
        self.heard.append(info.lease_id)

    def lose(self, error: ServiceError) -> None:
        self.heard.append(error)

    def unsure(self, error: SandboxError) -> None:
        self.heard.append(error)


def renewed(*lease_ids: str, **lost: ServiceError) -> Renewed:
    return Renewed(leases=tuple(LeaseInfo(lease_id=lease_id) for lease_id in lease_ids), lost=lost)


class TestBook:
    def test_a_lease_is_due_at_a_third_of_its_ttl(self) -> None:
        book = HeartbeatBook()
        book.add(Holder(), 300, now_s=0)

        assert (book.next_due_s(), book.due(99.9)) == (100, [])
        assert [beat.lease_ids for beat in book.due(100)] == [("l-1",)]

    def test_a_renewed_lease_is_due_a_third_later(self) -> None:
        book, holder = HeartbeatBook(), Holder()
        book.add(holder, 300, now_s=0)
        book.due(100)
        book.told(renewed("l-1"), now_s=101)

        assert (book.next_due_s(), holder.heard) == (201, ["l-1"])

    def test_those_due_soon_go_with_those_due_now(self) -> None:
        book = HeartbeatBook()
        for lease_id, now_s in (("a", 0), ("b", 20), ("c", 90)):
            book.add(Holder(lease_id), 300, now_s)

        assert [beat.lease_ids for beat in book.due(100)] == [("a", "b")]

    def test_a_ttl_has_a_request_of_its_own_and_many_leases_have_several(self) -> None:
        book = HeartbeatBook()
        for number in range(BATCH + 1):
            book.add(Holder(f"l-{number}"), 30, 0)
        book.add(Holder("other"), 60, 0)

        assert [(len(beat.lease_ids), beat.ttl_s) for beat in book.due(20)] == [(BATCH, 30), (1, 30), (1, 60)]

    def test_a_lost_lease_is_told_and_not_renewed_again(self) -> None:
        book, holder, error = HeartbeatBook(), Holder("x"), LeaseLost("expired")
        book.add(holder, 300, 0)
        book.told(renewed(x=error), 100)

        assert (holder.heard, book.next_due_s()) == ([error], None)

    def test_one_that_got_no_answer_is_due_again_soon(self) -> None:
        book, holder, error = HeartbeatBook(), Holder(), ConnectFailed()
        book.add(holder, 300, 0)
        (beat,) = book.due(100)
        book.failed(beat, error)

        assert (holder.heard, book.next_due_s()) == ([error], 105)

    def test_one_that_the_answer_forgot_is_due_again_soon(self) -> None:
        book = HeartbeatBook()
        book.add(Holder(), 12, 0)
        book.due(4)
        book.told(renewed(), 4)

        assert book.next_due_s() == 5

    def test_one_that_is_let_go_is_forgotten_even_by_a_late_answer(self) -> None:
        book, holder = HeartbeatBook(), Holder()
        book.add(holder, 300, 0)
        (beat,) = book.due(100)
        book.remove(["l-1"])
        book.told(renewed("l-1"), 101)
        book.failed(beat, ConnectFailed())

        assert (holder.heard, book.next_due_s()) == ([], None)


@pytest.mark.parametrize(("error", "warnings"), [(ConnectFailed(), 0), (SandboxError("refused"), 2)])
def test_renewals_that_fail_are_told_once_until_one_succeeds(error: SandboxError, warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    book = HeartbeatBook()
    book.add(Holder(), 300, 0)
    for _ in range(2):
        for now_s in (100, 105, 110):
            for beat in book.due(now_s):
                book.failed(beat, error)
        book.told(renewed("l-1"), 0)

    assert [record.levelname for record in caplog.records].count("WARNING") == warnings


async def test_a_service_that_is_away_is_told_once_for_all_that_ask(
    core: Sender, script: Script, fake_time: FakeTime, caplog: pytest.LogCaptureFixture
) -> None:
    heartbeat = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock)
    script.steps = [*[httpx.ConnectError("refused")] * 3, httpx.Response(200, json={"leases": [a_lease()], "lost": []})]
    heartbeat.add(Holder(), 300)
    for wait_s in (100, 5, 5, 5):
        fake_time.now_s += wait_s
        await heartbeat.beat()
    await heartbeat.aclose()

    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [line.partition(",")[0] for line in told] == [f"no answer from {URL}", f"{URL} answers again after 15.0 s"]


@pytest.fixture
def core(fake_time: FakeTime) -> Sender:
    return Sender(Endpoint(URL, None), RetryPolicy(total_s=0), clock=fake_time.clock)


async def test_the_task_renews_what_is_due_and_ends_with_the_last_lease(core: Sender, script: Script, fake_time: FakeTime) -> None:
    heartbeat, holder = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock), Holder()
    script.steps = [httpx.Response(200, json={"leases": [], "lost": [{"lease_id": "l-1", "code": "lease_lost", "detail": "expired"}]})]
    heartbeat.add(holder, 300)
    (task,) = [task for task in asyncio.all_tasks() if task.get_name() == "sandbox-heartbeat"]
    fake_time.now_s += 100
    await task

    assert script.bodies() == [{"lease_ids": ["l-1"], "ttl_s": 300}]
    assert [type(heard) for heard in holder.heard] == [LeaseLost]


async def test_the_task_starts_again_and_ends_when_closed(core: Sender, script: Script, fake_time: FakeTime) -> None:
    heartbeat = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock)
    heartbeat.add(Holder(), 300)
    heartbeat.remove(["l-1"])
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        await task
    heartbeat.add(Holder(), 300)
    await heartbeat.aclose()

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_renewal_that_fails_is_surfaced_and_tried_again(core: Sender, script: Script, fake_time: FakeTime) -> None:
    heartbeat, holder = AsyncHeartbeat(AsyncSender(core, httpx.MockTransport(script)), fake_time.clock), Holder()
    script.steps = [httpx.ConnectError("refused"), httpx.Response(200, json={"leases": [a_lease()], "lost": []})]
    heartbeat.add(holder, 300)
    fake_time.now_s += 100
    await heartbeat.beat()
    fake_time.now_s += 5
    await heartbeat.beat()
    await heartbeat.aclose()

    assert isinstance(holder.heard[0], ConnectFailed)
    assert holder.heard[1:] == ["l-1"]


def test_the_thread_renews_what_is_due_and_ends_with_the_last_lease(core: Sender, script: Script, fake_time: FakeTime) -> None:
    heartbeat, holder, threads, looked = ThreadHeartbeat(SyncSender(core, httpx.MockTransport(script)), fake_time.clock), Holder(), [], threading.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        threads.append(threading.current_thread())
        looked.set()
        return httpx.Response(200, json={"leases": [], "lost": [{"lease_id": "l-1", "code": "sandbox_lost"}]})

    script.steps = [answer]
    heartbeat.add(holder, -1)  # due at once
    assert looked.wait(30)
    (thread,) = threads
    thread.join(30)

    assert not thread.is_alive()
    assert thread.daemon
    assert script.bodies() == [{"lease_ids": ["l-1"], "ttl_s": -1}]
    assert [type(heard) for heard in holder.heard] == [SandboxLost]


def test_the_thread_ends_when_closed(core: Sender, script: Script, fake_time: FakeTime) -> None:
    heartbeat = ThreadHeartbeat(SyncSender(core, httpx.MockTransport(script)), fake_time.clock)
    heartbeat.add(Holder(), 300)
    heartbeat.close()

    assert "sandbox-heartbeat" not in [thread.name for thread in threading.enumerate()]

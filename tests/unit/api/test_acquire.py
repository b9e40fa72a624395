"""An acquire whose caller goes away, or whose service does."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request

from sandbox_server.api.body import ClientDisconnected
from sandbox_server.api.body_budget import BodyBudget
from sandbox_server.api.limits import Limits
from sandbox_server.api.request_context import REQUEST_CONTEXT_KEY, SERVICE_KEY, RequestContext, Service
from sandbox_server.api.routes.leases import acquire
from sandbox_server.api.tenants import Tenant, Tenants
from sandbox_server.core.errors import Draining
from sandbox_server.core.types import Acquired, AcquireRequest
from sandbox_server.telemetry import Telemetry


class FakePools:
    """Grants when told to."""

    def __init__(self) -> None:
        self.queued: list[AcquireRequest] = []
        self.left: list[AcquireRequest] = []
        self.given_back: list[tuple[Acquired, str | None]] = []
        self.grant = asyncio.Event()
        self.grants_when_cancelled = False

    async def acquire(self, request: AcquireRequest) -> Acquired:
        self.queued.append(request)
        try:
            await self.grant.wait()
        except asyncio.CancelledError:
            if not self.grants_when_cancelled:
                self.left.append(request)
                raise
        return Acquired(leases=(), waited_s=0.0)

    async def flush(self) -> None:
        """Nothing is kept here."""

    def release_undelivered_leases(self, acquired: Acquired, request_key: str | None) -> None:
        self.given_back.append((acquired, request_key))


class AcquireHarness:
    """A request in flight."""

    def __init__(self) -> None:
        self.pools = FakePools()
        self.messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.messages.put_nowait({"type": "http.request", "body": b'{"request_key": "k"}', "more_body": False})
        self.service = Service(
            pools=self.pools,  # type: ignore[arg-type]
            dispatcher=None,  # type: ignore[arg-type]
            files=None,  # type: ignore[arg-type]
            ports=None,  # type: ignore[arg-type]
            terminals=None,  # type: ignore[arg-type]
            run_batches=None,  # type: ignore[arg-type]
            call_queries=None,  # type: ignore[arg-type]
            events=None,  # type: ignore[arg-type]
            telemetry=Telemetry(),
            flush=self.pools.flush,
            tenants=Tenants([]),
            limits=Limits(),
            body_budget=BodyBudget(Limits()),
            default_pool="default",
            stopping=asyncio.get_running_loop().create_future(),
        )
        scope = {"type": "http", "headers": [], SERVICE_KEY: self.service, REQUEST_CONTEXT_KEY: RequestContext(tenant=Tenant(name="a"), request_id="r")}
        self.asking = asyncio.create_task(acquire(Request(scope, self.messages.get)))

    async def queued(self) -> None:
        while not self.pools.queued:
            await asyncio.sleep(0)

    def disconnected(self) -> None:
        self.messages.put_nowait({"type": "http.disconnect"})


@pytest.fixture
async def harness() -> AcquireHarness:
    one = AcquireHarness()
    await one.queued()
    return one


async def test_a_granted_acquire_is_answered(harness: AcquireHarness) -> None:
    harness.pools.grant.set()

    assert (await harness.asking).status_code == 200
    assert harness.pools.given_back == []


async def test_a_caller_that_hangs_up_leaves_the_queue(harness: AcquireHarness) -> None:
    harness.disconnected()

    with pytest.raises(ClientDisconnected):
        await harness.asking
    assert len(harness.pools.left) == 1
    assert harness.pools.given_back == []


async def test_what_is_granted_to_a_caller_that_is_gone_is_given_back_under_its_key(harness: AcquireHarness) -> None:
    harness.disconnected()
    harness.pools.grant.set()

    with pytest.raises(ClientDisconnected):
        await harness.asking
    assert [key for _, key in harness.pools.given_back] == ["k"]


async def test_what_is_granted_while_leaving_is_given_back(harness: AcquireHarness) -> None:
    harness.pools.grants_when_cancelled = True
    harness.disconnected()

    with pytest.raises(ClientDisconnected):
        await harness.asking
    assert len(harness.pools.given_back) == 1


async def test_a_service_that_stops_sends_the_queue_away(harness: AcquireHarness) -> None:
    harness.service.stopping.set_result(None)

    with pytest.raises(Draining):
        await harness.asking
    assert len(harness.pools.left) == 1


async def test_a_request_that_is_cancelled_leaves_the_queue(harness: AcquireHarness) -> None:
    harness.asking.cancel()

    with pytest.raises(asyncio.CancelledError):
        await harness.asking
    assert len(harness.pools.left) == 1

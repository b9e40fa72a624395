"""What the routes work with: the parts of the service that they call, and what is known about each request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import HTTPConnection, Request

from sandbox_server.api.body_budget import BodyBudget
from sandbox_server.api.limits import Limits
from sandbox_server.api.tenants import Tenant, Tenants
from sandbox_server.core.errors import Forbidden, PoolServiceError, Stopping, StorageUnavailable
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolSpec, PoolView, SandboxView
from sandbox_server.dispatch.call_queries import CallQueries
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.dispatch.ports import SlotPorts
from sandbox_server.dispatch.run_batch.registry import RunBatches
from sandbox_server.dispatch.terminals import Terminals
from sandbox_server.pool.access import Actor
from sandbox_server.pool.events import Event
from sandbox_server.telemetry import Telemetry

SERVICE_KEY = "sandbox.service"
REQUEST_CONTEXT_KEY = "sandbox.request_context"


class PoolOperations(Protocol):
    """The operations on pools, leases and sandboxes that the routes call. `pool.service.PoolService` implements them."""

    async def acquire(self, request: AcquireRequest) -> Acquired: ...

    def release_undelivered_leases(self, acquired: Acquired, request_key: str | None) -> None: ...

    def release(
        self,
        tenant: str,
        *,
        lease_ids: Sequence[str] | None = None,
        run_id: str | None = None,
        reset_workspace: bool = True,
        request_key: str | None = None,
    ) -> tuple[Sequence[str], Sequence[str]]: ...

    def renew(self, tenant: str, lease_ids: Sequence[str], ttl_s: float) -> tuple[Sequence[Lease], Sequence[PoolServiceError]]: ...

    def lease(self, tenant: str, lease_id: str) -> Lease: ...

    def leases(
        self, tenant: str, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> tuple[Sequence[Lease], str | None]: ...

    async def narrow(self, tenant: str, lease_id: str, *, allow_network: bool | None, cache: str | None, read_only: Sequence[str]) -> Lease: ...

    def views(self, *, actor: Actor, tenant: str | None = None) -> Sequence[PoolView]: ...

    def view(self, name: str, *, actor: Actor, tenant: str | None = None) -> PoolView: ...

    async def put_pool(
        self, name: str, spec: PoolSpec, *, actor: Actor, tenant: str | None, check: Callable[[PoolSpec | None], None], origin: str = "api"
    ) -> tuple[PoolView, bool]: ...

    async def delete_pool(self, name: str, *, actor: Actor, tenant: str | None, force: bool = False) -> None: ...

    async def verify(self, name: str, *, actor: Actor, tenant: str | None) -> Mapping[str, Any]: ...

    def sandboxes(self, *, actor: Actor) -> Sequence[SandboxView]: ...

    async def drain_sandbox(self, sandbox_id: str, *, actor: Actor) -> SandboxView: ...

    def readiness(self) -> Mapping[str, Any]: ...


class EventSource(Protocol):
    """The events of the service. `pool.events.EventLog` implements it."""

    def follow(self, after: int | None = None) -> AsyncIterator[Event | None]: ...


@dataclass(frozen=True, kw_only=True)
class Service:
    """Everything that a route may call."""

    pools: PoolOperations
    dispatcher: Dispatcher
    files: SlotFiles
    ports: SlotPorts
    terminals: Terminals
    run_batches: RunBatches
    tenants: Tenants
    limits: Limits
    body_budget: BodyBudget
    """The memory that the bodies of requests may take."""
    default_pool: str
    call_queries: CallQueries
    events: EventSource
    telemetry: Telemetry
    flush: Callable[[], Awaitable[None]]
    """Waits until every change so far is on disk. A response that depends on a change is sent after that."""
    stopping: asyncio.Future[None]
    """Done once the service begins to stop."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    """The tasks of the requests in progress; cancelled when a stop has waited for them long enough."""

    stream_counts: Counter[str] = field(default_factory=Counter)
    """How many event streams are open, by tenant."""

    terminal_counts: Counter[str] = field(default_factory=Counter)
    """How many connections to terminals are open, by tenant."""

    warnings: list[str] = field(default_factory=list)
    """What the service cannot protect in the environment that it runs in: a sentence each, which says what to do."""

    storage_problem: Callable[[], str | None] = lambda: None
    """Why the service cannot write its state at present, and what to do; None: it can."""

    def check_storage(self) -> None:
        """Refuse a request that needs new records while the service cannot write them.

        Raises:
            StorageUnavailable: the service cannot write its state at present.
        """
        problem = self.storage_problem()
        if problem is not None:
            raise StorageUnavailable(problem, retry_after_s=2)

    def check_not_stopping(self) -> None:
        """Refuse new work while the service stops.

        Raises:
            Stopping: the service is stopping.
        """
        if self.stopping.done():
            raise Stopping


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestContext:
    """What is known about a request before its route runs: the tenant whose token it carries, and its id."""

    tenant: Tenant
    request_id: str


def service_of(request: HTTPConnection) -> Service:
    """The service, from the scope of a request."""
    service: Service = request.scope[SERVICE_KEY]
    return service


def tenant_of_scope(scope: Mapping[str, Any]) -> str | None:
    """The name of the tenant whose token authenticated the request of this scope; None: it carried no valid token, or needed none."""
    context: RequestContext | None = scope.get(REQUEST_CONTEXT_KEY)
    return context.tenant.name or None if context is not None else None


def tenant_of(request: HTTPConnection) -> Tenant:
    """The tenant whose token authenticated a request."""
    context: RequestContext = request.scope[REQUEST_CONTEXT_KEY]
    return context.tenant


def actor_of(request: Request) -> Actor:
    """The tenant of a request, as the pools check its rights."""
    tenant = tenant_of(request)
    return Actor(tenant=tenant.name, admin=tenant.admin)


def check_admin(request: Request, what: str) -> None:
    """Refuse a request that only admins may make.

    Args:
        request: the request.
        what: what it does, for the error: "drain sandboxes".

    Raises:
        Forbidden: the tenant of the request is not an admin.
    """
    if not tenant_of(request).admin:
        raise Forbidden(f"only an admin may {what}")

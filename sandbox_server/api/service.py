"""What the handlers of this room work with: the service as the api sees it, and the caller of one request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from starlette.requests import Request

from sandbox_server.api.body_budget import BodyBudget
from sandbox_server.api.limits import Limits
from sandbox_server.api.tenants import Tenant, Tenants
from sandbox_server.core.errors import Forbidden, PoolServiceError, Stopping, StorageUnavailable
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolSpec, PoolView, SandboxView
from sandbox_server.dispatch.call_records import CallRecords
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.pool.access import Actor
from sandbox_server.pool.events import Event
from sandbox_server.telemetry import Telemetry

SERVICE_KEY = "sandbox.service"
CALLER_KEY = "sandbox.caller"


class PoolsSeam(Protocol):
    """Who has which slot, as far as the api asks. `pool.Pools` is it."""

    async def acquire(self, request: AcquireRequest) -> Acquired: ...

    def undelivered(self, acquired: Acquired, request_key: str | None) -> None: ...

    def release(
        self, tenant: str, *, lease_ids: Sequence[str] | None = None, run_id: str | None = None, reset_workspace: bool = True
    ) -> tuple[Sequence[str], Sequence[str]]: ...

    def renew(self, tenant: str, lease_ids: Sequence[str], ttl_s: float) -> tuple[Sequence[Lease], Sequence[PoolServiceError]]: ...

    def lease(self, tenant: str, lease_id: str) -> Lease: ...

    def leases(
        self, tenant: str, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int = 100, cursor: str | None = None
    ) -> tuple[Sequence[Lease], str | None]: ...

    async def narrow(self, tenant: str, lease_id: str, *, allow_network: bool | None, cache: str | None) -> Lease: ...

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


class EventsSeam(Protocol):
    """What has changed. `pool.events.EventLog` is it."""

    def follow(self, after: int | None = None) -> AsyncIterator[Event | None]: ...


@dataclass(frozen=True, kw_only=True)
class Service:
    """Everything a handler may call."""

    pools: PoolsSeam
    dispatcher: Dispatcher
    files: SlotFiles
    tenants: Tenants
    limits: Limits
    bodies: BodyBudget
    """The memory that the bodies of requests may take."""
    default_pool: str
    records: CallRecords
    events: EventsSeam
    telemetry: Telemetry
    flush: Callable[[], Awaitable[None]]
    """Returns once what was decided so far is on disk; an answer that rests on it leaves after that."""
    stopping: asyncio.Future[None]
    """Done once the service has been told to stop."""
    requests: set[asyncio.Task[Any]] = field(default_factory=set)
    """What is being answered now; cancelled when the grace of a stop is over."""

    streams: Counter[str] = field(default_factory=Counter)
    """How many event streams are open, by tenant."""

    warnings: list[str] = field(default_factory=list)
    """What the service cannot protect where it runs now, each in a sentence that says what to do."""

    storage_trouble: Callable[[], str | None] = lambda: None
    """Why nothing new can be recorded at present, and what to do; None: it can."""

    def check_storage(self) -> None:
        """Refuse what takes room for records while there is none to spare, or while what is recorded would not be found again.

        Raises:
            StorageUnavailable: it cannot be recorded at present.
        """
        trouble = self.storage_trouble()
        if trouble is not None:
            raise StorageUnavailable(trouble, retry_after_s=2)

    def check_not_stopping(self) -> None:
        """Refuse new work of a service that is going away.

        Raises:
            Stopping: it has been told to stop.
        """
        if self.stopping.done():
            raise Stopping


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """Who asks, in which request."""

    tenant: Tenant
    request_id: str


def service_of(request: Request) -> Service:
    """The service that this request reached."""
    service: Service = request.scope[SERVICE_KEY]
    return service


def tenant_of_scope(scope: Mapping[str, Any]) -> str | None:
    """The tenant by whose token the request of this scope was let in; None: it came without a valid token."""
    caller: Caller | None = scope.get(CALLER_KEY)
    return caller.tenant.name or None if caller is not None else None


def tenant_of(request: Request) -> Tenant:
    """The tenant whose token this request carries."""
    caller: Caller = request.scope[CALLER_KEY]
    return caller.tenant


def actor_of(request: Request) -> Actor:
    """Who this request is to be, where it looks at pools or does something to them."""
    tenant = tenant_of(request)
    return Actor(tenant=tenant.name, admin=tenant.admin)


def check_admin(request: Request, what: str) -> None:
    """Refuse what is kept for admins.

    Raises:
        Forbidden: this token is no admin's.
    """
    if not tenant_of(request).admin:
        raise Forbidden(f"only an admin may {what}")

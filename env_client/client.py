"""The two clients: the verbs of the contract over connections of their own, and leases that are kept and given back."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Self, Unpack

import httpx

from env_client.blocks import async_block, block
from env_client.discovery import find_service
from env_client.errors import SandboxError
from env_client.leases import AsyncLease, Lease
from env_client.retry import RetryPolicy
from env_client.transport.connections import async_connections, default_max_connections, sync_connections
from env_client.transport.heartbeat import AsyncHeartbeat, ThreadHeartbeat
from env_client.transport.sending import AsyncSender, Sender, SyncSender
from env_client.values import AcquireOptions
from env_client.verbs import AsyncVerbs, Verbs

#: The contract's default `ttl_s`.
DEFAULT_TTL_S = 300.0
#: How long a renewal, or a release on the way out of an error, is repeated, in seconds.
HASTY_S = 2.0


class AsyncSandboxClient(AsyncVerbs):
    """A client of the sandbox service for asyncio. One of them serves thousands of rollouts of one event loop.

    Args:
        url: the service's address; default `SANDBOX_URL`, else this machine's service.
        token: default `SANDBOX_TOKEN`, else that of this machine's service.
        retry: how patient to be.
        max_connections: how many requests may be under way; more wait. Default 1,000, or half of the files the process may open.
        transport: what carries the requests instead of connections of the client's own.

    Raises:
        ServiceNotFound: nobody says where the service is.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        retry: RetryPolicy | None = None,
        max_connections: int | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        core, hasty = _cores(url, token, retry)
        carrier = transport or async_connections(httpx.URL(core.endpoint.url), max_connections or default_max_connections())
        super().__init__(AsyncSender(core, carrier))
        self._hasty = AsyncVerbs(AsyncSender(hasty, carrier))
        self._heartbeat = AsyncHeartbeat(AsyncSender(hasty, carrier))

    @async_block
    @asynccontextmanager
    async def lease(self, pool: str | None = None, **options: Unpack[AcquireOptions]) -> AsyncIterator[AsyncLease]:
        """One slot for the time of the block: acquired, renewed at a third of `ttl_s`, released at the end.

        Args and errors: as `acquire`.
        """
        async with self.gang(1, pool, **options) as (lease,):
            yield lease

    @async_block
    @asynccontextmanager
    async def gang(self, count: int, pool: str | None = None, **options: Unpack[AcquireOptions]) -> AsyncIterator[tuple[AsyncLease, ...]]:
        """As `lease`, for `count` slots: all of them or none."""
        leases = await self.hold(count, pool, **options)
        try:
            yield leases
        except BaseException as error:
            self._heartbeat.remove(_ids(leases))
            try:
                await self._hasty.release(_ids(leases))
            except SandboxError as second:
                error.add_note(f"the leases {', '.join(_ids(leases))} could not be released either: {second}")
            raise
        await self.give_back(leases)

    async def hold(self, count: int = 1, pool: str | None = None, **options: Unpack[AcquireOptions]) -> tuple[AsyncLease, ...]:
        """As `gang`, without a block: renewed until `give_back`, or until this client is closed."""
        acquired = await self.acquire(pool, count, **options)
        self._sender.core.check_open()
        leases = tuple(AsyncLease(self, info) for info in acquired.leases)
        for lease in leases:
            self._heartbeat.add(lease, options.get("ttl_s") or DEFAULT_TTL_S)
        return leases

    async def give_back(self, leases: Sequence[AsyncLease], *, reset_workspace: bool = True) -> None:
        """Renew leases no longer, and release them. Those that have ended already are left at that.

        Args:
            leases: which.
            reset_workspace: False keeps the files for the run's next acquire.
        """
        self._heartbeat.remove(_ids(leases))
        await self.release(_ids(leases), reset_workspace=reset_workspace)

    async def aclose(self) -> None:
        """Stop renewing and close the connections. Leases that are still held end with their `ttl_s`."""
        await self._heartbeat.aclose()
        await self._sender.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()


class SandboxClient(Verbs):
    """As `AsyncSandboxClient`, blocking; one of them serves any number of threads."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        retry: RetryPolicy | None = None,
        max_connections: int | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        core, hasty = _cores(url, token, retry)
        carrier = transport or sync_connections(httpx.URL(core.endpoint.url), max_connections or default_max_connections())
        super().__init__(SyncSender(core, carrier))
        self._hasty = Verbs(SyncSender(hasty, carrier))
        self._heartbeat = ThreadHeartbeat(SyncSender(hasty, carrier))

    @block
    @contextmanager
    def lease(self, pool: str | None = None, **options: Unpack[AcquireOptions]) -> Iterator[Lease]:
        """As `AsyncSandboxClient.lease`."""
        with self.gang(1, pool, **options) as (lease,):
            yield lease

    @block
    @contextmanager
    def gang(self, count: int, pool: str | None = None, **options: Unpack[AcquireOptions]) -> Iterator[tuple[Lease, ...]]:
        """As `AsyncSandboxClient.gang`."""
        leases = self.hold(count, pool, **options)
        try:
            yield leases
        except BaseException as error:
            self._heartbeat.remove(_ids(leases))
            try:
                self._hasty.release(_ids(leases))
            except SandboxError as second:
                error.add_note(f"the leases {', '.join(_ids(leases))} could not be released either: {second}")
            raise
        self.give_back(leases)

    def hold(self, count: int = 1, pool: str | None = None, **options: Unpack[AcquireOptions]) -> tuple[Lease, ...]:
        """As `AsyncSandboxClient.hold`."""
        acquired = self.acquire(pool, count, **options)
        self._sender.core.check_open()
        leases = tuple(Lease(self, info) for info in acquired.leases)
        for lease in leases:
            self._heartbeat.add(lease, options.get("ttl_s") or DEFAULT_TTL_S)
        return leases

    def give_back(self, leases: Sequence[Lease], *, reset_workspace: bool = True) -> None:
        """As `AsyncSandboxClient.give_back`."""
        self._heartbeat.remove(_ids(leases))
        self.release(_ids(leases), reset_workspace=reset_workspace)

    def close(self) -> None:
        """As `AsyncSandboxClient.aclose`."""
        self._heartbeat.close()
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _cores(url: str | None, token: str | None, retry: RetryPolicy | None) -> tuple[Sender, Sender]:
    """What builds and decides: for the verbs, and for what must not hold anything up for long."""
    endpoint, policy = find_service(url, token), retry or RetryPolicy()
    core = Sender(endpoint, policy)
    return core, Sender(endpoint, dataclasses.replace(policy, total_s=min(HASTY_S, policy.total_s)), contact=core.contact)


def _ids(leases: Sequence[AsyncLease] | Sequence[Lease]) -> list[str]:
    return [lease.lease_id for lease in leases]

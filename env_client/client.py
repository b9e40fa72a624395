"""The two clients. They add connections, and leases that are renewed and released automatically, to the operations of the contract."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Self, Unpack

import httpx

from env_client.context_managers import explained_async_context_manager, explained_context_manager
from env_client.discovery import find_service
from env_client.errors import SandboxError
from env_client.leases import AsyncLease, Lease
from env_client.messages.leases import new_request_key, release_cancelled_message
from env_client.operations.lease_operations import AsyncOperations, Operations
from env_client.retry import RetryPolicy
from env_client.transport.cancellation import finish_despite_cancellation
from env_client.transport.connections import async_connections, default_max_connections, sync_connections
from env_client.transport.heartbeat import AsyncHeartbeat, ThreadHeartbeat
from env_client.transport.request_core import RequestCore
from env_client.transport.senders import AsyncSender, SyncSender
from env_client.values import Acquired, AcquireOptions

log = logging.getLogger("env_client")

#: The contract's default `ttl_s`, in seconds.
DEFAULT_TTL_S = 300.0
#: How long a renewal, or a release after an error, is retried, in seconds.
SHORT_RETRY_S = 2.0
#: How long a cancelled acquire of an `AsyncSandboxClient` waits at most for the release of its slots, in seconds. One release takes milliseconds, but
#: those of a thousand acquires that are cancelled together take seconds.
CANCELLED_RELEASE_S = 10.0


class AsyncSandboxClient(AsyncOperations):
    """An asyncio client of the sandbox service. One client serves thousands of rollouts in one event loop.

    Args:
        url: the address of the service; default `SANDBOX_URL`, else the service of this machine.
        token: the token; default `SANDBOX_TOKEN`, else the token of this machine's service.
        retry: how long requests are repeated.
        max_connections: how many requests may be in flight; more wait. Default 1,000, or half of the number of files that the process may open.
        transport: an httpx transport that carries the requests, instead of the client's own connections.

    Raises:
        ServiceNotFound: no address is given, and none is found.
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
        core, short_retry_core = _request_cores(url, token, retry)
        connections = transport or async_connections(httpx.URL(core.endpoint.url), max_connections or default_max_connections())
        super().__init__(AsyncSender(core, connections))
        self._short_retry_sender = AsyncSender(short_retry_core, connections)
        self._short_retry_operations = AsyncOperations(self._short_retry_sender)
        self._heartbeat = AsyncHeartbeat(self._short_retry_sender)

    async def acquire(self, pool: str | None = None, count: int = 1, **options: Unpack[AcquireOptions]) -> Acquired:
        """Acquire slots as `AsyncOperations.acquire` does. If the acquire is cancelled, its slots are released, whatever the service has granted by then.

        The release takes at most 10 s. A `request_key` that the caller has given is not released: the caller can acquire with it again, or release it.
        """
        if options.get("request_key"):
            return await super().acquire(pool, count, **options)
        return await self._acquire_or_release(pool, count, options)

    @explained_async_context_manager
    @asynccontextmanager
    async def lease(self, pool: str | None = None, **options: Unpack[AcquireOptions]) -> AsyncIterator[AsyncLease]:
        """Hold one slot for the duration of an `async with` block. The lease is renewed every third of `ttl_s`, and released at the end of the block.

        Arguments and errors are those of `acquire`.
        """
        async with self.gang(1, pool, **options) as (lease,):
            yield lease

    @explained_async_context_manager
    @asynccontextmanager
    async def gang(self, count: int, pool: str | None = None, **options: Unpack[AcquireOptions]) -> AsyncIterator[tuple[AsyncLease, ...]]:
        """Hold `count` slots, all or none, for the duration of an `async with` block, as `lease` does."""
        leases = self._renew_leases(await self._acquire_or_release(pool, count, options), options)
        try:
            yield leases
        except BaseException as error:  # also on cancellation and Ctrl-C: the leases end with the block, however it ends
            self._heartbeat.remove_leases(_lease_ids(leases))
            try:
                await self._short_retry_operations.release(_lease_ids(leases))
            except SandboxError as release_error:
                error.add_note(_not_released(leases, release_error))
            raise
        await self.give_back(leases)

    async def hold(self, count: int = 1, pool: str | None = None, **options: Unpack[AcquireOptions]) -> tuple[AsyncLease, ...]:
        """Acquire slots as `acquire` does, and renew their leases until `give_back` is called or the client is closed."""
        return self._renew_leases(await self.acquire(pool, count, **options), options)

    async def _acquire_or_release(self, pool: str | None, count: int, options: AcquireOptions) -> Acquired:
        keyed_options, request_key = _with_request_key(options)
        try:
            return await super().acquire(pool, count, **keyed_options)
        except asyncio.CancelledError:  # the service may have granted the slots, or grant them when the request arrives
            await finish_despite_cancellation(self._release_cancelled_acquire(request_key))
            raise

    async def _release_cancelled_acquire(self, request_key: str) -> None:
        try:
            async with asyncio.timeout(CANCELLED_RELEASE_S):
                await self._short_retry_sender.send(release_cancelled_message(request_key))
        except SandboxError as error:
            _warn_of_unreleased_key(request_key, str(error))
        except TimeoutError:
            _warn_of_unreleased_key(request_key, f"the release took longer than {CANCELLED_RELEASE_S:g} s")

    def _renew_leases(self, acquired: Acquired, options: AcquireOptions) -> tuple[AsyncLease, ...]:
        self._sender.core.check_open()
        leases = tuple(AsyncLease(self, info) for info in acquired.leases)
        for lease in leases:
            self._heartbeat.add_lease(lease, options.get("ttl_s") or DEFAULT_TTL_S)
        return leases

    async def give_back(self, leases: Sequence[AsyncLease], *, reset_workspace: bool = True) -> None:
        """Stop renewing leases, and release them. Leases that have ended already are no error.

        Args:
            leases: the leases.
            reset_workspace: False keeps the files for the next acquire of the run.
        """
        self._heartbeat.remove_leases(_lease_ids(leases))
        await self.release(_lease_ids(leases), reset_workspace=reset_workspace)

    async def aclose(self) -> None:
        """Stop renewing leases and close the connections. Leases that are still held end after their `ttl_s`."""
        await self._heartbeat.stop_renewals()
        await self._sender.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await self.aclose()


class SandboxClient(Operations):
    """The blocking counterpart of `AsyncSandboxClient`. One client serves any number of threads."""

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        retry: RetryPolicy | None = None,
        max_connections: int | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        core, short_retry_core = _request_cores(url, token, retry)
        connections = transport or sync_connections(httpx.URL(core.endpoint.url), max_connections or default_max_connections())
        super().__init__(SyncSender(core, connections))
        self._short_retry_sender = SyncSender(short_retry_core, connections)
        self._short_retry_operations = Operations(self._short_retry_sender)
        self._heartbeat = ThreadHeartbeat(self._short_retry_sender)

    def acquire(self, pool: str | None = None, count: int = 1, **options: Unpack[AcquireOptions]) -> Acquired:
        """See `AsyncSandboxClient.acquire`. Ctrl-C and `SystemExit` cancel an acquire of the main thread."""
        if options.get("request_key"):
            return super().acquire(pool, count, **options)
        return self._acquire_or_release(pool, count, options)

    @explained_context_manager
    @contextmanager
    def lease(self, pool: str | None = None, **options: Unpack[AcquireOptions]) -> Iterator[Lease]:
        """See `AsyncSandboxClient.lease`."""
        with self.gang(1, pool, **options) as (lease,):
            yield lease

    @explained_context_manager
    @contextmanager
    def gang(self, count: int, pool: str | None = None, **options: Unpack[AcquireOptions]) -> Iterator[tuple[Lease, ...]]:
        """See `AsyncSandboxClient.gang`."""
        leases = self._renew_leases(self._acquire_or_release(pool, count, options), options)
        try:
            yield leases
        except BaseException as error:  # also on cancellation and Ctrl-C: the leases end with the block, however it ends
            self._heartbeat.remove_leases(_lease_ids(leases))
            try:
                self._short_retry_operations.release(_lease_ids(leases))
            except SandboxError as release_error:
                error.add_note(_not_released(leases, release_error))
            raise
        self.give_back(leases)

    def hold(self, count: int = 1, pool: str | None = None, **options: Unpack[AcquireOptions]) -> tuple[Lease, ...]:
        """See `AsyncSandboxClient.hold`."""
        return self._renew_leases(self.acquire(pool, count, **options), options)

    def _acquire_or_release(self, pool: str | None, count: int, options: AcquireOptions) -> Acquired:
        keyed_options, request_key = _with_request_key(options)
        try:
            return super().acquire(pool, count, **keyed_options)
        except (KeyboardInterrupt, SystemExit):  # a second one ends the release as well
            try:
                self._short_retry_sender.send(release_cancelled_message(request_key))
            except SandboxError as error:
                _warn_of_unreleased_key(request_key, str(error))
            raise

    def _renew_leases(self, acquired: Acquired, options: AcquireOptions) -> tuple[Lease, ...]:
        self._sender.core.check_open()
        leases = tuple(Lease(self, info) for info in acquired.leases)
        for lease in leases:
            self._heartbeat.add_lease(lease, options.get("ttl_s") or DEFAULT_TTL_S)
        return leases

    def give_back(self, leases: Sequence[Lease], *, reset_workspace: bool = True) -> None:
        """See `AsyncSandboxClient.give_back`."""
        self._heartbeat.remove_leases(_lease_ids(leases))
        self.release(_lease_ids(leases), reset_workspace=reset_workspace)

    def close(self) -> None:
        """See `AsyncSandboxClient.aclose`."""
        self._heartbeat.stop_renewals()
        self._sender.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _request_cores(url: str | None, token: str | None, retry: RetryPolicy | None) -> tuple[RequestCore, RequestCore]:
    """Create the request core of a client, and one that retries only briefly, for requests that must not delay anything else."""
    endpoint, policy = find_service(url, token), retry or RetryPolicy()
    core = RequestCore(endpoint, policy)
    return core, RequestCore(endpoint, dataclasses.replace(policy, total_s=min(SHORT_RETRY_S, policy.total_s)), state=core.state)


def _with_request_key(options: AcquireOptions) -> tuple[AcquireOptions, str]:
    """Return the options of an acquire with a request key, and the key, which is a new one unless the options have one."""
    request_key = options.get("request_key") or new_request_key()
    return {**options, "request_key": request_key}, request_key


def _warn_of_unreleased_key(request_key: str, reason: str) -> None:
    log.warning("slots of a cancelled acquire may stay leased until their leases expire, because its request_key %s was not released: %s", request_key, reason)


def _lease_ids(leases: Sequence[AsyncLease] | Sequence[Lease]) -> list[str]:
    return [lease.lease_id for lease in leases]


def _not_released(leases: Sequence[AsyncLease] | Sequence[Lease], release_error: SandboxError) -> str:
    """The note on the error of a block whose leases could not be released."""
    return f"the leases {', '.join(_lease_ids(leases))} could not be released either: {release_error}"

"""The connection of a process to the pool in whose slots it rolls out: it makes the pool, acquires and releases slots, and ends the run."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Self, TypeVar

from env_client import (
    AcquireOptions,
    AsyncLease,
    AsyncSandboxClient,
    BackendUnavailable,
    CallGatherer,
    ClientClosed,
    ConnectFailed,
    Draining,
    EmbeddedFailed,
    EmbeddedService,
    Forbidden,
    InvalidRequest,
    NoCapacity,
    NotImplementedYet,
    PoolConflict,
    PoolInfo,
    PoolNotFound,
    RetryPolicy,
    SandboxClient,
    SandboxError,
    ServiceNotFound,
    TimedOut,
    TransportError,
    Unauthorized,
    available_tools,
    embedded,
)
from environments.rollouts.cancellation import close_when_started, finish_despite_cancellation, was_cancelled
from environments.rollouts.exec_tool import ExecTool, RolloutFault
from environments.rollouts.pool_spec import PoolRequest, describe_missing_service

V = TypeVar("V")

log = logging.getLogger(__name__)

#: How long to wait before the pool is made again while the service still deletes the old one, in seconds.
_DELETION_POLL_S = 0.2
#: How long a request waits whose rollout or run is being ended, in seconds: a service that does not answer must not hold up a process that was told to end.
_END_REQUEST_S = 10.0
#: The same, after one of these requests was not answered in time.
_UNRESPONSIVE_S = 1.0
#: Errors of an acquire that every later acquire would get, too.
_PERMANENT_ERRORS = (InvalidRequest, Unauthorized, Forbidden)
#: How long an embedded service may take until it listens, in seconds. Environments start on machines that are busy with models.
_EMBEDDED_START_S = 120.0
#: The pool that an embedded service has at its start. Nothing uses it.
_UNUSED_POOL = {"default": {"min_sandboxes": 0, "max_sandboxes": 1}}


class PoolUnavailable(Exception):
    """The run cannot have its pool, and must end. The message is one sentence for the person who has started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionSettings:
    """How a process uses the service.

    Args:
        sandbox_url: the address of the service; None for an embedded service, which ends with the connection.
        sandbox_token: the token.
        lease_ttl_s: how long a slot stays leased after this process has died, in seconds. If a tool call still ran, the
            slot stays leased until 60 s after its end.
        tool_batch_window_ms: how long a tool call waits for others before it is sent, in milliseconds.
        tool_max_batch_size: how many tool calls one request carries at most.
        releases_run: whether all slots of the run are released at the end; otherwise they end after `lease_ttl_s`.
        run_id: the run that owns the slots; None for a new id.
        retry: how long a request is repeated that gets no response; None for the client's default.
    """

    sandbox_url: str | None = None
    sandbox_token: str | None = None
    lease_ttl_s: float = 300.0
    tool_batch_window_ms: float = 20.0
    tool_max_batch_size: int = 200
    releases_run: bool = True
    run_id: str | None = None
    retry: RetryPolicy | None = None


class PoolConnection:
    """The pool in whose slots this process rolls out. Use it as `async with PoolConnection(request, settings) as pool: …`, in one event loop.

    Args:
        request: the pool.
        settings: how the service is used.
    """

    def __init__(self, request: PoolRequest, settings: ConnectionSettings | None = None) -> None:
        self.request = request
        self._settings = settings or ConnectionSettings()
        #: The run that owns all slots of this connection.
        self.run_id = self._settings.run_id or "run-" + secrets.token_hex(8)
        self._resources = AsyncExitStack()
        self._client: AsyncSandboxClient | None = None
        self._thread_client: SandboxClient | None = None
        self._gatherer: CallGatherer | None = None
        self._pool_info: PoolInfo | None = None
        self._url = ""
        self._acquires: set[asyncio.Task[tuple[AsyncLease, ...]]] = set()
        self._has_acquired = False
        self._held_lease_ids: set[str] = set()
        self._cache_refused = False
        self._closed = False
        self._run_released = False
        self._has_asked = False
        self._unresponsive = False

    @property
    def client(self) -> AsyncSandboxClient:
        """The client of the event loop."""
        return _opened(self._client)

    @property
    def thread_client(self) -> SandboxClient:
        """A blocking client for any number of threads, such as those of reward functions."""
        return _opened(self._thread_client)

    @property
    def gatherer(self) -> CallGatherer:
        """Sends the tool calls of all trajectories."""
        return _opened(self._gatherer)

    @property
    def pool_info(self) -> PoolInfo:
        """The pool as the service described it when the connection was opened."""
        return _opened(self._pool_info)

    @property
    def url(self) -> str:
        """The address of the service."""
        return self._url

    @property
    def default_timeout_s(self) -> float:
        """The timeout of a tool call in this pool, in seconds."""
        return float(self.pool_info.spec.get("default_timeout_s", 30.0))

    async def fetch_available_tools(self) -> tuple[str, ...]:
        """Return the slot tools that a model can use in the pool, as soon as one of its sandboxes has started; until then, the tools of every pool."""
        if not isinstance(self.pool_info.capabilities.get("tools"), list | tuple):
            with suppress(SandboxError):  # the answer of the opening is good enough until the service answers again
                self._pool_info = await self.client.pool(self.request.name)
        return available_tools(self.pool_info.capabilities)

    async def open(self) -> None:
        """Connect to the service, or start an embedded one, and ensure that the pool exists.

        Raises:
            PoolUnavailable: there is no service, it does not accept the token, or it does not have the pool and does not make it.
        """
        try:
            await self._open()
        except BaseException:  # also of a cancelled opening: an embedded service must not stay
            await finish_despite_cancellation(self.aclose())
            raise

    async def aclose(self) -> None:
        """Release all slots of the run, close the connections, and end the embedded service. It never raises an error of the service."""
        if self._closed:
            return
        self._closed = True
        acquires = list(self._acquires)
        for acquire in acquires:
            acquire.cancel()
        await asyncio.gather(*acquires, return_exceptions=True)
        await self._resources.aclose()

    def describe_end(self) -> str:
        """Return what became of the slots of the run when the connection was closed, as a part of a sentence."""
        if self._run_released or not self._has_asked:
            return "all slots are released"
        return f"slots that are still leased end after {self._settings.lease_ttl_s:.0f} s"

    async def acquire(self, trajectory_ids: Sequence[str], *, cache: str | None = "rw", waits_for_own: bool = False) -> tuple[AsyncLease, ...]:
        """Acquire a slot for each trajectory: all of them or none. They are renewed until they are released.

        Args:
            trajectory_ids: the trajectories.
            cache: `rw` for the set-up cache of the sandbox; None for none.
            waits_for_own: whether to wait beyond the `acquire_timeout_s` of the pool for as long as this process holds slots itself, which come free when
                its rollouts end. A caller that holds a slot must not do that.

        Raises:
            RolloutFault: no slots could be acquired; a later attempt may succeed.
            PoolUnavailable: no attempt can succeed.
        """
        self._check_open()
        self._has_asked = True
        task = asyncio.create_task(self._hold(list(trajectory_ids), cache, waits_for_own))
        self._acquires.add(task)
        task.add_done_callback(self._acquires.discard)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self._closed and not (current and current.cancelling()):  # `aclose` has cancelled the acquire, and not the caller
                raise RolloutFault("the run has ended", reason="run_ended") from None
            if not task.cancelled() and task.exception() is None:  # the acquire was faster than its cancellation, which releases what it is granted
                await finish_despite_cancellation(self.release(task.result(), cancelled=True))
            raise

    async def release(self, leases: Sequence[AsyncLease], *, cancelled: bool = False) -> None:
        """Release slots and have them reset. It never raises an error of the service: a lease that cannot be released ends by itself.

        Args:
            leases: the slots.
            cancelled: whether the rollout was cancelled, and the release must not wait long for a service that does not answer.
        """
        self._held_lease_ids.difference_update(lease.lease_id for lease in leases)
        release = self.client.give_back(leases)
        try:
            await (self._at_end(release) if cancelled else release)
        except ClientClosed:  # the end of the run has released them
            return
        except SandboxError as error:
            lease_ids = ", ".join(lease.lease_id for lease in leases)
            log.warning("the leases %s could not be released; they end after %.0f s: %s", lease_ids, self._settings.lease_ttl_s, error)

    @asynccontextmanager
    async def slot(self, trajectory_id: str) -> AsyncIterator[AsyncLease]:
        """Hold one slot for the duration of a block. It is released at the end, also if the task is cancelled several times."""
        (lease,) = await self.acquire([trajectory_id])
        try:
            yield lease
        finally:
            await finish_despite_cancellation(self.release([lease], cancelled=was_cancelled()))

    def make_exec_tool(self, lease: AsyncLease) -> ExecTool:
        """Return what hooks use to run tool calls in a slot."""
        trajectory_id = lease.info.trajectory_id or "trajectory"
        return ExecTool(lease, self.gatherer, lambda: self.slot(f"{trajectory_id}/fresh-{secrets.token_hex(4)}"))

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await finish_despite_cancellation(self.aclose())

    async def _open(self) -> None:
        settings = self._settings
        url, token = settings.sandbox_url, settings.sandbox_token
        if not url:
            start = asyncio.ensure_future(asyncio.to_thread(self._start_embedded_service))  # signals are handled meanwhile
            self._resources.push_async_callback(close_when_started, start, PoolUnavailable)
            service = await asyncio.shield(start)
            url, token = service.url, service.token
        self._url = url
        try:
            self._client = AsyncSandboxClient(url, token, retry=settings.retry)
            self._resources.push_async_callback(self._client.aclose)
            self._thread_client = SandboxClient(url, token, retry=settings.retry)
            self._resources.callback(self._thread_client.close)
            self._pool_info = await self._ensure_pool()
        except SandboxError as error:
            raise PoolUnavailable(await self._describe_open_error(error)) from error
        self._resources.push_async_callback(self._release_run)
        self._gatherer = CallGatherer(self._client, window_ms=settings.tool_batch_window_ms, max_batch_size=settings.tool_max_batch_size)
        self._resources.push_async_callback(self._gatherer.aclose)

    def _start_embedded_service(self) -> EmbeddedService:
        if self.request.spec is None:
            raise PoolUnavailable(describe_missing_service(self.request.name))
        try:
            return embedded(_UNUSED_POOL, start_s=_EMBEDDED_START_S)
        except EmbeddedFailed as error:
            raise PoolUnavailable(f"sandbox_url is not set, and {error.detail}") from error

    async def _ensure_pool(self) -> PoolInfo:
        """Make the pool, or find it if it must exist already."""
        if self.request.spec is None:
            return await self.client.pool(self.request.name)
        return (await self.client.pool_put(self.request.name, self.request.spec)).pool

    async def _describe_open_error(self, error: SandboxError) -> str:
        """Return one sentence that names the setting."""
        if isinstance(error, ServiceNotFound):
            return f"sandbox_url: {error.detail}"
        if isinstance(error, TransportError):
            cause = "" if isinstance(error, ConnectFailed) else f": {error.detail}"  # the client has logged why it could not connect
            return f"sandbox_url: no sandbox service answers at {self._url}{cause}; start one there, or correct the address"
        if isinstance(error, Unauthorized):
            return f"sandbox_token: the service at {self._url} does not accept the token: {error.detail}"
        if isinstance(error, PoolNotFound):
            names = ""
            with suppress(SandboxError):  # the names only help; the sentence is complete without them
                names = ", ".join(pool.name for pool in await self.client.pools())
            return f"sandbox_pool: the service at {self._url} has no pool {self.request.name!r}; it has {names or 'none'}"
        return self._refused(error)

    def _refused(self, error: SandboxError) -> str:
        backend = "" if self.request.spec is None else f" on the backend {self.request.spec['backend']}"
        return f"the service at {self._url} refuses the pool {self.request.name!r}{backend}: {error.detail}"

    async def _at_end(self, request: Awaitable[object]) -> None:
        """Wait for a request that releases slots, but not for long.

        Raises:
            TimedOut: the service did not answer soon enough.
        """
        limit_s = _UNRESPONSIVE_S if self._unresponsive else _END_REQUEST_S
        try:
            async with asyncio.timeout(limit_s):
                await request
        except TimeoutError:
            self._unresponsive = True
            raise TimedOut(f"the service did not answer within {limit_s:g} s") from None

    async def _hold(self, trajectory_ids: list[str], cache: str | None, waits_for_own: bool) -> tuple[AsyncLease, ...]:
        deadline_s = asyncio.get_running_loop().time() + self.request.acquire_timeout_s
        try:
            while True:
                given_cache = None if self._cache_refused else cache
                try:
                    leases = await self._hold_once(trajectory_ids, given_cache)
                except NotImplementedYet as error:  # the isolation mode of the pool has no cache
                    if given_cache is None:
                        raise
                    if not self._cache_refused:
                        self._cache_refused = True
                        log.warning("the slots of pool %s have no set-up cache, so each of them is set up by itself: %s", self.request.name, error.detail)
                except (PoolNotFound, Draining, PoolConflict):  # the pool was deleted because nobody used it, or is being deleted
                    if self.request.spec is None or asyncio.get_running_loop().time() > deadline_s:
                        raise
                    await self._make_pool_again()
                except NoCapacity:
                    if not (waits_for_own and self._held_lease_ids):
                        raise
                else:
                    self._has_acquired = True
                    self._held_lease_ids.update(lease.lease_id for lease in leases)
                    return leases
        except SandboxError as error:
            if isinstance(error, _PERMANENT_ERRORS) or (isinstance(error, PoolNotFound | BackendUnavailable) and not self._has_acquired):
                raise PoolUnavailable(self._refused(error)) from error
            raise RolloutFault(f"no slots could be acquired: {error.detail}", reason=error.code) from error

    async def _hold_once(self, trajectory_ids: list[str], cache: str | None) -> tuple[AsyncLease, ...]:
        options: AcquireOptions = {
            "run_id": self.run_id,
            "trajectory_ids": trajectory_ids,
            "ttl_s": self._settings.lease_ttl_s,
            "wait_s": self.request.acquire_timeout_s,
            "cache": cache,
        }
        return await self.client.hold(len(trajectory_ids), self.request.name, **options)

    async def _make_pool_again(self) -> None:
        log.info("the pool %s had been deleted and is made again", self.request.name)
        try:
            await self._ensure_pool()
        except (Draining, PoolConflict):  # it is still being deleted
            await asyncio.sleep(_DELETION_POLL_S)

    async def _release_run(self) -> None:
        if not self._settings.releases_run:
            return
        try:
            await self._at_end(self.client.release(run_id=self.run_id))
            self._run_released = True
        except SandboxError as error:
            log.warning("the slots of run %s could not be released; they end after %.0f s: %s", self.run_id, self._settings.lease_ttl_s, error)

    def _check_open(self) -> None:
        if self._closed:
            raise RolloutFault("the run has ended", reason="run_ended")


def _opened(value: V | None) -> V:
    if value is None:
        raise RuntimeError("the connection to the pool is not open: use it as `async with PoolConnection(…) as pool`")
    return value

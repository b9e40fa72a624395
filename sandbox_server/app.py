"""The composition root: builds the service from its settings, starts it, and stops it. uvicorn serves `app`.

This is the only module that knows every package.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.types import Receive, Scope, Send

from sandbox_server.api.api import build_api
from sandbox_server.api.body_budget import BodyBudget
from sandbox_server.api.request_context import Service, tenant_of_scope
from sandbox_server.api.run_batch.start import start_run_batches
from sandbox_server.api.tenants import Tenant, Tenants
from sandbox_server.backends.base import Backend
from sandbox_server.backends.registry import load_backend
from sandbox_server.connection_limiter import HEAD_WITHIN_S
from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.clock import Clock, SystemClock
from sandbox_server.core.errors import InvalidRequest, NotImplementedHere, StorageUnavailable
from sandbox_server.core.threads import start_thread_pool
from sandbox_server.dispatch.call_admission import CallLimits
from sandbox_server.dispatch.call_queries import CallQueries
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.dispatcher import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.dispatch.lease_ends import follow_lease_ends
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.limits.response_budget import ResponseBudget, ResponseLimits
from sandbox_server.dispatch.ports import SlotPorts
from sandbox_server.dispatch.runner.decisions import CallTimings
from sandbox_server.dispatch.terminals import Terminals
from sandbox_server.link import connect
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S
from sandbox_server.pool.catalog import BUILT_IN, OF_THE_FILE
from sandbox_server.pool.dependencies import Connect, PoolDependencies, PoolLimits
from sandbox_server.pool.events import EventLog
from sandbox_server.pool.service import PoolService
from sandbox_server.settings import LOCAL_TENANT, Settings, SettingsError, load_settings
from sandbox_server.signals import SignalHandlers
from sandbox_server.state_dir import StateDir, StateDirError
from sandbox_server.state_monitor import StateMonitor
from sandbox_server.store.base import Store
from sandbox_server.store.memory import MemoryStore
from sandbox_server.store.output_files import OutputFiles
from sandbox_server.store.sqlite.store import OUTPUT_FOLDER, SqliteStore, StoreUnusable
from sandbox_server.telemetry import Telemetry, configure_logging
from sandbox_server.uvicorn_connections import limit_connections

log = logging.getLogger(__name__)

UNKNOWN_URL = "http://ADDRESS"
"""Printed in place of the address of a server that does not report it, if `SANDBOX_ADVERTISE_URL` is not set."""
REQUESTS_GRACE_S = 2.0
"""How long requests may continue after the service began to stop, in seconds."""
FINAL_RESPONSE_S = 0.5
"""How long requests may take to send their responses after their calls were ended, in seconds."""
POOLS_STOP_S = 4.5
STORE_CLOSE_S = 1.0
WORKER_THREADS = 6
"""For what would hold up the event loop: files, processes, control groups."""
STATE_FILE = "state.db"


MakeBackend = Callable[[str, Path, str, bool, Mapping[str, Any]], Backend]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of the service that tests and embedders can replace.

    Args:
        backend: makes a backend from its name, the service's state folder, its owner name, whether sandboxes outlive the service, and the
            settings of this backend.
        connect: opens a link to an agent.
        response_timeout_s: for how long an agent may be silent while it owes a response that it can give at once, in seconds.
        call_timings: how long agents may take to report the results of calls.
        store: opens the store from the path of its file and the clock; raises StoreUnusable.
        clock: gives the time.
        configure_logging: sets up the log, from its format and level.
        head_within_s: how long the head of a request may take, in seconds.
        requests_grace_s: how long requests may continue after the service began to stop, in seconds.
    """

    backend: MakeBackend = load_backend
    connect: Connect = connect
    response_timeout_s: float = RESPONSE_TIMEOUT_S
    call_timings: CallTimings = field(default_factory=CallTimings)
    store: Callable[[Path, Clock], Store] = SqliteStore
    clock: Clock = field(default_factory=SystemClock)
    configure_logging: Callable[[str, str], None] = configure_logging
    head_within_s: float = HEAD_WITHIN_S
    requests_grace_s: float = REQUESTS_GRACE_S


@dataclass(frozen=True, kw_only=True)
class RunningService:
    """The objects of a service that has been started."""

    settings: Settings
    state_dir: StateDir
    store: Store
    state_monitor: StateMonitor
    pools: PoolService
    service: Service
    lease_ends: asyncio.Task[None]
    ephemeral: bool = False


class Application:
    """The service as an ASGI application.

    Args:
        load: loads the settings, at the start of the service and again on SIGHUP.
        parts: the parts to build the service from; default: those of production.
        announced: whether `announce` will be called once the server listens.
        ephemeral: whether every sandbox is destroyed when the service stops, and no state is kept.
    """

    def __init__(self, load: Callable[[], Settings] = load_settings, *, parts: Parts | None = None, announced: bool = False, ephemeral: bool = False) -> None:
        self._load = load
        self._parts = parts or Parts()
        self._ephemeral = ephemeral
        self._announced = announced
        self._edge = build_api()
        self._running: RunningService | None = None
        self._has_tenants = False
        self._stopping: asyncio.Task[None] | None = None
        self._signals: SignalHandlers | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._edge(scope, receive, send)

    def announce(self, url: str) -> None:
        """Publish the address at which the service listens: in the state folder, for clients on this machine, and on standard output.

        An address that is set in the settings is published in its place.

        Args:
            url: the address of the service.
        """
        running = self._running
        if running is None:
            return
        if running.settings.advertise_url is None:
            running.state_dir.write_server_file(url)
        print_example_command(running, running.settings.advertise_url or url)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            running = self._running = await start_service(self._load(), self._parts, ephemeral=self._ephemeral)
        except (SettingsError, StateDirError) as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        unprotected = limit_connections(receive, tenant_of_scope, self._parts.head_within_s)
        if unprotected is not None:
            log.warning(unprotected)
            running.service.warnings.append(unprotected)
        self._edge.service = running.service
        self._has_tenants = bool(running.settings.tenants)
        signals = self._signals = SignalHandlers(self._stop, self._reload_tenants)
        signals.install()
        if not self._announced:
            print_example_command(running, running.settings.advertise_url or UNKNOWN_URL)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        signals.uninstall()
        running.state_dir.unlock()
        await send({"type": "lifespan.shutdown.complete"})

    def _stop(self) -> asyncio.Task[None]:
        """Begin to stop the service. Further calls return the same task."""
        assert self._running is not None
        if self._stopping is None:
            self._stopping = asyncio.create_task(stop_service(self._running, self._parts.requests_grace_s))
            if self._signals is not None:
                self._stopping.add_done_callback(self._signals.service_stopped)
        return self._stopping

    def _reload_tenants(self) -> None:
        assert self._running is not None
        try:
            settings = self._load()
            if not settings.tenants and self._has_tenants:
                file = settings.config_path or "the environment"
                raise SettingsError(
                    f"{file} names no tenants any more, and no token would be valid: name a tenant, or restart the service so that it makes a token of its own"
                )
            self._running.service.tenants.replace(_tenants(settings, self._running.state_dir))
        except (SettingsError, StateDirError) as error:
            log.error("the tenants were not changed: %s", error)
        else:
            self._has_tenants = bool(settings.tenants)
            self._running.service.dispatcher.concurrency_limiter.apply_limits()
            log.info("the tenants were loaded again")


async def start_service(settings: Settings, parts: Parts, *, ephemeral: bool = False) -> RunningService:
    """Build and start a service.

    Args:
        settings: the settings.
        parts: the parts to build it from.
        ephemeral: whether no state is kept.

    Raises:
        SettingsError: a backend of the settings is not available.
        StateDirError: the state folder cannot be used.
    """
    parts.configure_logging(settings.log_format, settings.log_level)
    asyncio.get_running_loop().set_default_executor(start_thread_pool(WORKER_THREADS, "worker"))
    state_dir = StateDir.open(settings.state_dir)
    with cleanup_on_failure(state_dir.unlock):
        running = await _start_in(settings, state_dir, parts, ephemeral=ephemeral)
    if settings.advertise_url is not None:
        state_dir.write_server_file(settings.advertise_url)
    running.state_monitor.start_checks()
    return running


async def _start_in(settings: Settings, state_dir: StateDir, parts: Parts, *, ephemeral: bool) -> RunningService:
    tenants = Tenants(_tenants(settings, state_dir), authentication_disabled=settings.authentication_disabled)
    clock, telemetry = parts.clock, Telemetry()
    store = _open_store(state_dir, parts, ephemeral=ephemeral)
    try:
        pools = await _start_pools(settings, state_dir, parts, store, tenants, telemetry, survives=store.durable and not ephemeral)
    except BaseException:  # also if the start is cancelled: the store has a thread and open files
        await store.close()
        raise
    named = settings.limits
    limits = CallLimits(in_flight=named.calls_in_flight, of_lease=named.lease_calls)
    state_monitor = StateMonitor(state_dir, store)
    response_budget = ResponseBudget(ResponseLimits(memory_bytes=named.answer_memory_bytes, file_bytes=named.answer_file_bytes, wait_s=named.answer_wait_s))
    limiter, ports, terminals = ConcurrencyLimiter(tenants.max_running_calls), SlotPorts(pools, named.port_connections), Terminals(pools)
    dispatcher = Dispatcher(pools, store, clock, telemetry, limits, CallTracker(pools.restored), limiter, response_budget, parts.call_timings)
    end_handlers = (dispatcher.handle_lease_end, ports.handle_lease_end, terminals.handle_lease_end)
    lease_ends = asyncio.create_task(follow_lease_ends(pools.follow_ended_leases(), end_handlers))
    service = Service(
        pools=pools,
        dispatcher=dispatcher,
        files=SlotFiles(pools),
        ports=ports,
        terminals=terminals,
        run_batches=await start_run_batches(pools, dispatcher, store, clock, state_dir.path, settings.limits),
        call_queries=CallQueries(pools, store, dispatcher.call_tracker, clock, dispatcher.outputs),
        events=pools.events,
        telemetry=telemetry,
        flush=pools.flush,
        tenants=tenants,
        limits=settings.limits,
        body_budget=BodyBudget(settings.limits),
        default_pool=settings.default_pool,
        stopping=asyncio.get_running_loop().create_future(),
        storage_problem=lambda: state_monitor.problem,
    )
    return RunningService(
        settings=settings,
        state_dir=state_dir,
        store=store,
        state_monitor=state_monitor,
        pools=pools,
        service=service,
        lease_ends=lease_ends,
        ephemeral=ephemeral,
    )


async def _start_pools(
    settings: Settings, state_dir: StateDir, parts: Parts, store: Store, tenants: Tenants, telemetry: Telemetry, *, survives: bool
) -> PoolService:
    dependencies = PoolDependencies(
        store=store,
        clock=parts.clock,
        connect=parts.connect,
        response_timeout_s=parts.response_timeout_s,
        meter=telemetry,
        events=EventLog(clock=parts.clock),
        weight=tenants.weight,
        max_leases=tenants.max_leases,
        max_slots=tenants.max_slots,
        max_waiters=tenants.max_waiters,
        claim_after_s=settings.claim_after_s,
        limits=PoolLimits(max_waiters=settings.limits.waiters, max_pools=settings.limits.pools),
    )
    owner = state_dir.owner()

    def make_backend(name: str) -> Backend:
        return parts.backend(name, state_dir.path, owner, survives, settings.of_backend(name))

    backends, origins = load_backends(settings, make_backend), dict.fromkeys(settings.pools, BUILT_IN if settings.pools_are_built_in else OF_THE_FILE)
    pools = PoolService(settings.pools, backends, store, parts.clock, owner=owner, dependencies=dependencies, origins=origins, load_backend=make_backend)
    await pools.start()
    return pools


def _open_store(state_dir: StateDir, parts: Parts, *, ephemeral: bool) -> Store:
    """Open the store of the state folder. An ephemeral service keeps its records in memory."""
    if ephemeral:
        return MemoryStore(outputs=OutputFiles(state_dir.path / OUTPUT_FOLDER))
    try:
        return parts.store(state_dir.path / STATE_FILE, parts.clock)
    except StoreUnusable as error:
        raise StateDirError(str(error)) from None


def load_backends(settings: Settings, make: Callable[[str], Backend]) -> dict[str, Backend]:
    """Make every backend that a pool of the settings uses.

    Args:
        settings: the settings.
        make: makes the backend of a name.

    Returns:
        The backends, by name.

    Raises:
        SettingsError: backends are not available; the error has a line for each pool that names one of them.
    """
    backends: dict[str, Backend] = {}
    problems: list[str] = []
    for pool, spec in settings.pools.items():
        if spec.backend in backends:
            continue
        try:
            backends[spec.backend] = make(spec.backend)
        except (InvalidRequest, NotImplementedHere) as error:
            where = "the built-in pool" if settings.pools_are_built_in else f"settings file {settings.config_path}: pools.{pool}"
            problems.append(f"{where}.backend: {error.detail}")
    if problems:
        raise SettingsError("\n".join(problems))
    return backends


async def stop_service(running: RunningService, requests_grace_s: float = REQUESTS_GRACE_S) -> None:
    """Stop a service in less than ten seconds: wait `requests_grace_s` for its requests, cancel the rest, end or keep the sandboxes, close the store."""
    service = running.service
    if not service.stopping.done():
        service.stopping.set_result(None)
    running.state_dir.remove_server_file()
    log.info("stopping", extra={"requests": len(service.requests)})
    service.run_batches.begin_stop()
    await _wait_for_requests(service, requests_grace_s)
    await service.dispatcher.end_all_calls()
    await service.run_batches.stop()
    running.lease_ends.cancel()
    await _wait_for_requests(service, FINAL_RESPONSE_S)
    for task in list(service.requests):
        task.cancel()
    await _wait_for_requests(service, FINAL_RESPONSE_S)
    await service.run_batches.close()
    try:
        async with asyncio.timeout(POOLS_STOP_S):
            await running.pools.stop("destroy" if running.ephemeral else None)
    except TimeoutError:
        log.error("not every sandbox was gone within %g s", POOLS_STOP_S)
    await running.state_monitor.stop_checks()
    try:
        async with asyncio.timeout(STORE_CLOSE_S):
            await running.store.close()
    except (TimeoutError, StorageUnavailable):
        log.exception("the last changes of the state could not be written")
    log.info("stopped")


async def _wait_for_requests(service: Service, wait_s: float) -> None:
    if service.requests:
        await asyncio.wait(service.requests, timeout=wait_s)


def _tenants(settings: Settings, state_dir: StateDir) -> tuple[Tenant, ...]:
    if settings.authentication_disabled:
        log.warning("SANDBOX_AUTH=none: everyone who can connect to this service, slots that share its network included, may do everything")
        return (Tenant(name=LOCAL_TENANT, admin=True),)
    return settings.tenants or (Tenant(name=LOCAL_TENANT, token=state_dir.token(), admin=True),)


def print_example_command(running: RunningService, url: str) -> None:
    """Print an example command, if the service made its own token. The command reads the token from its file and does not show it."""
    if not running.settings.authentication_disabled and not running.settings.tenants:
        print_line(f'curl -H "Authorization: Bearer $(cat {running.state_dir.token_path})" {url}/v1/pools')


def print_line(line: str) -> None:
    """Print a line on standard output. An error, as of a file on a full disk, is logged and does not stop the service."""
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("standard output cannot be written: %s", error.strerror, extra={"line": line})


app = Application()

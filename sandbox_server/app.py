"""The composition root: settings, state, store, backends, pools, dispatch, api, put together and taken apart. `app` is what uvicorn serves."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import Receive, Scope, Send

from sandbox_server.api.api import build_api
from sandbox_server.api.service import Service
from sandbox_server.api.tenants import Tenant, Tenants
from sandbox_server.backends.base import Backend
from sandbox_server.backends.registry import load_backend
from sandbox_server.core.clock import Clock, SystemClock
from sandbox_server.core.errors import InvalidRequest, NotImplementedHere
from sandbox_server.dispatch.dispatch import Dispatcher
from sandbox_server.dispatch.files import SlotFiles
from sandbox_server.link.agent_link import AgentLink
from sandbox_server.pool.pools import Pools
from sandbox_server.pool.store import MemoryStore
from sandbox_server.pool.wiring import Connect, PoolLimits, Wiring
from sandbox_server.settings import LOCAL_TENANT, Settings, SettingsError, load_settings
from sandbox_server.shutdown import Signals
from sandbox_server.state_dir import StateDir, StateDirError
from sandbox_server.telemetry import Telemetry, configure_logging

log = logging.getLogger(__name__)

DEFAULT_URL = "http://127.0.0.1:8000"
GRACE_S = 2.0
"""How long requests may go on after the service has been told to stop, in seconds."""
LAST_WORDS_S = 0.5
"""How long they may take to send what they have after that, in seconds."""
POOLS_STOP_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the service is built on, for tests and embedders to exchange.

    Args:
        backend: makes a backend, from its name, the service's state folder and its owner name.
        connect: makes a link to an agent.
        clock: what time it is.
        configure_logging: sends the log where the settings say.
    """

    backend: Callable[[str, Path, str], Backend] = load_backend
    connect: Connect = AgentLink.connect
    clock: Clock = field(default_factory=SystemClock)
    configure_logging: Callable[[str, str], None] = configure_logging


@dataclass(frozen=True, kw_only=True)
class Running:
    """What a started service consists of."""

    settings: Settings
    state_dir: StateDir
    pools: Pools
    service: Service


class Application:
    """The service as an ASGI application.

    Args:
        load: gives the settings when the service starts, and again on SIGHUP.
        parts: what to build on.
        announced: whether `announce` will be called once it listens.
    """

    def __init__(self, load: Callable[[], Settings] = load_settings, *, parts: Parts | None = None, announced: bool = False) -> None:
        self._load = load
        self._parts = parts or Parts()
        self._announced = announced
        self._front = build_api()
        self._running: Running | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._signals: Signals | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        else:
            await self._front(scope, receive, send)

    def announce(self, url: str) -> None:
        """Tell this machine's clients where the service listens, unless the operator has told something else; and the person how to ask it."""
        running = self._running
        if running is None:
            return
        if running.settings.advertise_url is None:
            running.state_dir.announce(url)
        say_how_to_ask(running, running.settings.advertise_url or url)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            running = self._running = await start(self._load(), self._parts)
        except (SettingsError, StateDirError) as error:
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        self._front.service = running.service
        signals = self._signals = Signals(self._stop, self._reload_tenants)
        signals.install()
        if not self._announced:
            say_how_to_ask(running, running.settings.advertise_url or DEFAULT_URL)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._stop()
        signals.uninstall()
        running.state_dir.close()
        await send({"type": "lifespan.shutdown.complete"})

    def _stop(self) -> asyncio.Task[None]:
        """Begin to stop, once, however often it is asked for."""
        assert self._running is not None
        if self._stopping is None:
            self._stopping = asyncio.create_task(stop(self._running))
            if self._signals is not None:
                self._stopping.add_done_callback(self._signals.stopped)
        return self._stopping

    def _reload_tenants(self) -> None:
        assert self._running is not None
        try:
            settings = self._load()
            self._running.service.tenants.replace(_tenants(settings, self._running.state_dir))
        except (SettingsError, StateDirError) as error:
            log.error("the tenants are left as they were: %s", error)
        else:
            log.info("the tenants have been read again")


async def start(settings: Settings, parts: Parts) -> Running:
    """Start everything.

    Raises:
        SettingsError: a backend cannot be had.
        StateDirError: the state folder cannot be used.
    """
    parts.configure_logging(settings.log_format, settings.log_level)
    state_dir = StateDir.open(settings.state_dir)
    try:
        running = await _start_in(settings, state_dir, parts)
    except BaseException:
        state_dir.close()
        raise
    if settings.advertise_url is not None:
        state_dir.announce(settings.advertise_url)
    return running


async def _start_in(settings: Settings, state_dir: StateDir, parts: Parts) -> Running:
    tenants = Tenants(_tenants(settings, state_dir), open_door=settings.open_door)
    clock, store, telemetry = parts.clock, MemoryStore(), Telemetry()
    wiring = Wiring(
        store=store,
        clock=clock,
        connect=parts.connect,
        meter=telemetry,
        weight=tenants.weight,
        limits=PoolLimits(max_waiters=settings.limits.waiters),
    )
    owner = state_dir.owner()
    backends = load_backends(settings, state_dir.path, owner, parts.backend)
    pools = Pools(settings.pools, backends, store, clock, owner=owner, wiring=wiring)
    await pools.start()
    service = Service(
        pools=pools,
        dispatcher=Dispatcher(pools, store, clock, telemetry, settings.limits.calls_in_flight),
        files=SlotFiles(pools),
        tenants=tenants,
        limits=settings.limits,
        default_pool=settings.default_pool,
        stopping=asyncio.get_running_loop().create_future(),
    )
    return Running(settings=settings, state_dir=state_dir, pools=pools, service=service)


def load_backends(settings: Settings, state_dir: Path, owner: str, load: Callable[[str, Path, str], Backend] = load_backend) -> dict[str, Backend]:
    """Make every backend that a pool names.

    Raises:
        SettingsError: one cannot be had; it names the pool.
    """
    backends: dict[str, Backend] = {}
    for pool, spec in settings.pools.items():
        try:
            backends.setdefault(spec.backend, load(spec.backend, state_dir, owner))
        except (InvalidRequest, NotImplementedHere) as error:
            raise SettingsError(f"settings file {settings.config_path}: pools.{pool}.backend: {error.detail}") from None
    return backends


async def stop(running: Running) -> None:
    """Let requests end, then end them, then leave or destroy the sandboxes; in less than ten seconds altogether."""
    service = running.service
    if not service.stopping.done():
        service.stopping.set_result(None)
    running.state_dir.withdraw()
    log.info("stopping", extra={"requests": len(service.requests)})
    await _wait_for_requests(service, GRACE_S)
    await service.dispatcher.stop()
    await _wait_for_requests(service, LAST_WORDS_S)
    for task in list(service.requests):
        task.cancel()
    await _wait_for_requests(service, LAST_WORDS_S)
    try:
        async with asyncio.timeout(POOLS_STOP_S):
            await running.pools.stop()
    except TimeoutError:
        log.error("not every sandbox was gone within %g s", POOLS_STOP_S)
    log.info("stopped")


async def _wait_for_requests(service: Service, wait_s: float) -> None:
    if service.requests:
        await asyncio.wait(service.requests, timeout=wait_s)


def _tenants(settings: Settings, state_dir: StateDir) -> tuple[Tenant, ...]:
    if settings.open_door:
        log.warning("SANDBOX_AUTH=none: whoever reaches this service, and every slot that shares its network, may do everything")
        return (Tenant(name=LOCAL_TENANT, admin=True),)
    return settings.tenants or (Tenant(name=LOCAL_TENANT, token=state_dir.token(), admin=True),)


def say_how_to_ask(running: Running, url: str) -> None:
    """Print, where the service made its own token, a command that uses it without showing it."""
    if not running.settings.open_door and not running.settings.tenants:
        sys.stdout.write(f'curl -H "Authorization: Bearer $(cat {running.state_dir.token_path})" {url}/v1/pools\n')
        sys.stdout.flush()


app = Application()

"""The complete service in the test process with scripted agents: over ASGI, or behind a real port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from sandbox_server.api.tenants import Tenant
from sandbox_server.app import Application, Parts
from sandbox_server.backends.base import Backend
from sandbox_server.backends.registry import load_backend
from sandbox_server.core.types import PoolSpec
from sandbox_server.dispatch.runner.decisions import CallTimings
from sandbox_server.link import AgentEndpoint, AgentLink
from sandbox_server.settings import Settings
from sandbox_server.store.base import Store
from sandbox_server.store.memory import MemoryStore
from sandbox_server.uvicorn_server import PromptServer
from tests.support.scripted_agent import ScriptedAgent, ScriptedBackend

ALICE = Tenant(name="alice", token="alices-token", admin=True)
BOB = Tenant(name="bob", token="bobs-token")
POOL = PoolSpec(slots_per_sandbox=4, min_sandboxes=1, max_sandboxes=1, acquire_timeout_s=30.0, max_timeout_s=600.0, env_vars={"KEY": "value"})


def bearer(tenant: Tenant) -> dict[str, str]:
    """Return the headers of a tenant's requests."""
    return {"Authorization": f"Bearer {tenant.token}"}


@dataclass
class ServiceHarness:
    """A running service: an HTTP client, and the parts of the service."""

    application: Application
    http: httpx.AsyncClient
    backend: ScriptedBackend
    settings: Settings
    url: str = ""

    @property
    def agent(self) -> ScriptedAgent:
        """The agent of the one sandbox."""
        return self.backend.agent()

    async def acquire(self, count: int = 1, **fields: Any) -> list[str]:
        """Acquire slots; return their lease ids."""
        answer = await self.http.post("/v1/acquire", json={"count": count, **fields})
        assert answer.status_code == 200, answer.text
        return [lease["lease_id"] for lease in answer.json()["leases"]]

    async def batch(self, *calls: dict[str, Any]) -> list[dict[str, Any]]:
        """Run calls; return their results."""
        answer = await self.http.post("/v1/exec-batch", json={"calls": list(calls)})
        assert answer.status_code == 200, answer.text
        results: list[dict[str, Any]] = answer.json()["results"]
        return results


def bash(lease_id: str, command: str, **fields: Any) -> dict[str, Any]:
    """Return the fields of one call."""
    return {"lease_id": lease_id, "tool": "bash", "args": {"command": command}, **fields}


def make_settings(state_dir: Path, **changes: Any) -> Settings:
    """Return settings with two tenants and one small pool."""
    return replace(Settings(state_dir=state_dir, tenants=(ALICE, BOB), pools={"default": POOL}), **changes)


def make_application(
    settings: Settings, store: Store | None = None, *, real_backends: bool = False, call_timings: CallTimings | None = None
) -> tuple[Application, ScriptedBackend]:
    """Create a service that does not run yet, and its backend.

    Args:
        settings: what the operator decides.
        store: what it remembers in; default one that forgets.
        real_backends: whether only the local backend is the scripted one.
        call_timings: how long agents may take to report the results of calls; default as in production.
    """
    backend = ScriptedBackend()

    def load(name: str, state_dir: Path, owner: str, survives: bool, settings: Mapping[str, Any]) -> Backend:
        if real_backends and name != "local":
            return load_backend(name, state_dir, owner)
        backend.owner = owner
        return backend

    async def connect(endpoint: AgentEndpoint, timeout_s: float = 10.0) -> AgentLink:
        return await backend.connect(endpoint, timeout_s)

    remembered = store or MemoryStore()
    parts = Parts(
        backend=load,
        connect=connect,
        call_timings=call_timings or CallTimings(),
        store=lambda path, clock: remembered,
        configure_logging=lambda log_format, level: None,
    )
    return Application(lambda: settings, parts=parts), backend


@contextlib.asynccontextmanager
async def lifespan(application: Application) -> AsyncIterator[None]:
    """Start an ASGI application and stop it at the end.

    Raises:
        RuntimeError: it would not start; with its own words.
    """
    to_app: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    from_app: asyncio.Queue[Any] = asyncio.Queue()
    running = asyncio.create_task(application({"type": "lifespan"}, to_app.get, from_app.put))
    await to_app.put({"type": "lifespan.startup"})
    started = await from_app.get()
    if started["type"] != "lifespan.startup.complete":
        await running
        raise RuntimeError(started["message"])
    try:
        yield
    finally:
        await to_app.put({"type": "lifespan.shutdown"})
        await running


@contextlib.asynccontextmanager
async def open_service_harness(state_dir: Path, *, store: Store | None = None, real_backends: bool = False, **changes: Any) -> AsyncIterator[ServiceHarness]:
    """Run the service over ASGI; requests are those of the tenant alice."""
    settings = make_settings(state_dir, **changes)
    application, backend = make_application(settings, store, real_backends=real_backends)
    async with lifespan(application):
        transport = httpx.ASGITransport(application)
        async with httpx.AsyncClient(transport=transport, base_url="http://harness", headers=bearer(ALICE)) as http:
            yield ServiceHarness(application, http, backend, settings)


class _Server(PromptServer):
    """A server that reports when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets=sockets)
        self.listening.set()


@contextlib.asynccontextmanager
async def open_service_harness_on_port(state_dir: Path, *, call_timings: CallTimings | None = None, **changes: Any) -> AsyncIterator[ServiceHarness]:
    """Run the service behind uvicorn on a free port; requests are those of the tenant alice."""
    settings = make_settings(state_dir, **changes)
    application, backend = make_application(settings, call_timings=call_timings)
    server = _Server(uvicorn.Config(application, host="127.0.0.1", port=0, lifespan="on", log_config=None, access_log=False))
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, headers=bearer(ALICE), timeout=30.0, trust_env=False, verify=False) as http:
            yield ServiceHarness(application, http, backend, settings, url)
    finally:
        server.stop()
        await serving

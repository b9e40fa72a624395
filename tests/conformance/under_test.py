"""What the conformance suite needs of a backend: how to make it, how to harm it from outside, and what it leaves behind."""

from __future__ import annotations

import abc
import asyncio
import itertools
import os
import secrets
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path

from sandbox_server.backends.base import Backend, CreateContext, CreateFailed, OpensPipes
from sandbox_server.backends.group import GROUP_PREFIX, group_parents
from sandbox_server.backends.local import LocalBackend, make_local_backend
from sandbox_server.backends.processes import is_running
from sandbox_server.core.types import Handle, LocalSpec, PoolId, PoolSpec
from sandbox_server.link import AgentEndpoint, AgentLink, connect
from sandbox_server.testing import FakeAgent, FakeBackend

#: How long anything may take that the suite waits for, in seconds. Only a failing test waits that long.
TIMEOUT_S = 30.0
_numbers = itertools.count()


def new_sandbox_id() -> str:
    """Return a sandbox id that no other run of these tests on this machine uses."""
    return f"s-{os.getpid()}-{next(_numbers)}"


async def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds that nothing reports as an event.

    Raises:
        TimeoutError: it does not hold within `TIMEOUT_S`.
    """
    async with asyncio.timeout(TIMEOUT_S):
        while not condition():
            await asyncio.sleep(0.01)


class BackendUnderTest(abc.ABC):
    """One backend over one transport, and the harness outside of it.

    The defaults suit a backend whose agents are reached by `link.connect`, and which has nothing to run in its sandboxes but the agent.
    """

    @abc.abstractmethod
    def make_backend(self, owner: str = "first") -> Backend:
        """Make a backend of an owner. All backends of one `BackendUnderTest` share one control plane: each sees the sandboxes of the others."""

    @abc.abstractmethod
    def impossible_spec(self) -> PoolSpec:
        """Return a spec with which `create` raises `CreateFailed` with `permanent`, whenever it is tried."""

    @abc.abstractmethod
    async def kill(self, handle: Handle) -> None:
        """End a running sandbox from outside, as an operator, a crash or the control plane would. Returns when it has ended."""

    @abc.abstractmethod
    async def leftovers(self) -> list[str]:
        """Return what is left of all sandboxes of all owners: processes, groups, folders, containers. Empty once all were destroyed."""

    def spec(self) -> PoolSpec:
        """Return a spec whose sandboxes can be created."""
        return PoolSpec(slots_per_sandbox=1)

    def make_bare_backend(self, owner: str = "first") -> Backend:
        """Make a backend for tests that connect to no agent. It may run something in its sandboxes that starts faster than the agent."""
        return self.make_backend(owner)

    async def connect(self, endpoint: AgentEndpoint, timeout_s: float = TIMEOUT_S) -> AgentLink:
        """Connect to an agent, as `link.connect` does."""
        return await connect(endpoint, timeout_s)


def endpoint_of(handle: Handle, backend: Backend) -> AgentEndpoint:
    """Return where the agent of a created sandbox can be reached."""
    assert handle.address is not None, "the last checkpoint of a sandbox has an address"
    open_pipe = partial(backend.open_pipe, handle) if isinstance(backend, OpensPipes) else None
    return AgentEndpoint(address=handle.address, token=handle.token or "", certificate=handle.certificate, open_pipe=open_pipe)


async def create(backend: Backend, spec: PoolSpec, *, sandbox_id: str | None = None, steps: int | None = None) -> list[Handle]:
    """Create a sandbox.

    Args:
        backend: on which.
        spec: of its pool.
        sandbox_id: its id; default a new one.
        steps: after how many checkpoints the creation is given up; default after none.

    Returns:
        The checkpoints.

    Raises:
        CreateFailed: as the backend raised it. What it had yielded before is destroyed.
    """
    context = CreateContext(pool_id=PoolId("p"), spec=spec, sandbox_id=sandbox_id or new_sandbox_id())
    handles: list[Handle] = []
    try:
        async with aclosing(backend.create(context)) as checkpoints:
            async for handle in checkpoints:
                handles.append(handle)
                if len(handles) == steps:
                    break
    except CreateFailed:
        if handles:
            await backend.destroy(handles[-1])
        raise
    return handles


class ConformingFake(FakeBackend):
    """A fake backend whose agents have tokens of their own, and which can never create the sandboxes of a pool that wants paths of the machine."""

    def make_agent(self, pool: str, spec: PoolSpec, sandbox_id: str) -> FakeAgent:
        return FakeAgent(sandbox_id, token=secrets.token_hex(8), slots=spec.slots_per_sandbox)

    async def create(self, context: CreateContext) -> AsyncGenerator[Handle, None]:
        if context.spec.local.expose:
            raise CreateFailed("the fake backend has no paths of a machine", permanent=True)
        async with aclosing(super().create(context)) as checkpoints:
            async for handle in checkpoints:
                yield handle


class FakeUnderTest(BackendUnderTest):
    """The fake backend that ships with the service."""

    def __init__(self) -> None:
        self._first = ConformingFake("first")

    def make_backend(self, owner: str = "first") -> FakeBackend:
        backend = ConformingFake(owner)
        backend.handles, backend.agents = self._first.handles, self._first.agents
        return backend

    def impossible_spec(self) -> PoolSpec:
        return PoolSpec(slots_per_sandbox=1, local=LocalSpec(expose=("/does/not/exist",)))

    async def kill(self, handle: Handle) -> None:
        self._first.kill(handle.sandbox_id)

    async def leftovers(self) -> list[str]:
        return [*self._first.handles, *self._first.agents]

    async def connect(self, endpoint: AgentEndpoint, timeout_s: float = TIMEOUT_S) -> AgentLink:
        return await self._first.connect(endpoint, timeout_s)


#: Listens where an agent would and does nothing else, which takes a tenth of an agent's processor time.
LISTENER = """
import json, os, signal, socket, sys
config = json.loads(sys.stdin.read())
if "tls" in config["listen"]:
    port = socket.create_server(("127.0.0.1", 0))
    os.mkdir(config["base_dir"])
    with open(config["base_dir"] + "/listening.json", "w") as file:
        json.dump({"tls": port.getsockname()}, file)
listener = socket.socket(socket.AF_UNIX)
listener.bind(config["listen"]["unix"])
listener.listen()
signal.pause()
"""


class LocalUnderTest(BackendUnderTest):
    """The local backend over one transport.

    Args:
        folder: the state folder of all its services; with a short path, because sockets lie in it.
        transport: `unix`, `tls` or `stdio`.
    """

    def __init__(self, folder: Path, transport: str) -> None:
        self._folder = folder
        self._transport = transport

    def make_backend(self, owner: str = "first") -> LocalBackend:
        return make_local_backend(self._folder, owner, outlives_service=True, transport=self._transport)

    def make_bare_backend(self, owner: str = "first") -> LocalBackend:
        agent = self._folder / "listener.py"
        agent.write_text(LISTENER, encoding="utf-8")
        return LocalBackend(self._folder / "sandboxes", owner, lambda: agent, transport=self._transport)

    def impossible_spec(self) -> PoolSpec:
        return PoolSpec(slots_per_sandbox=1, local=LocalSpec(expose=("/does/not/exist",)))

    async def kill(self, handle: Handle) -> None:
        os.kill(handle.data["pid"], signal.SIGKILL)
        await wait_until(lambda: not is_running(handle.data["pid"], handle.data["started"]))

    async def leftovers(self) -> list[str]:
        sandboxes = self._folder / "sandboxes"
        folders = [str(path) for path in sandboxes.iterdir()] if sandboxes.exists() else []
        groups = [str(group) for parent in group_parents() for group in parent.glob(f"{GROUP_PREFIX}s-{os.getpid()}-*")]
        # What was moved to the trash is out of the way, and is deleted in the background.
        return folders + groups + [found for found in processes_below(self._folder) if f"{self._folder}/trash/" not in found]


def processes_below(folder: Path) -> list[str]:
    """Return the processes of this machine that have a folder in their arguments. Processes that have ended and wait for their parent have none."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"{folder}/" in arguments:
            found.append(f"process {process.name}: {arguments}")
    return found

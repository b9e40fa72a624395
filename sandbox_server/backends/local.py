"""Sandboxes on the service's own machine. Each is one agent process, reached over a unix socket in the state folder.

For tests and debugging the service can reach new agents over TLS, or over a relay's standard input and output, as it does on other backends.

STATE/sandboxes/SANDBOX_ID/handle.json   the last checkpoint
                           agent.sock    where the agent listens
                           agent.log     the agent's standard output and standard error
                           base/         the agent's own files: slots, trash, spool
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import secrets
import socket
import sys
import tempfile
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sandbox_server.agent.build import content
from sandbox_server.agent.init.oom_score import protect_this_process
from sandbox_server.agent.isolation.bwrap_processes import kill_bwrap_processes
from sandbox_server.agent.kernel.priority import raise_priority
from sandbox_server.agent.server.listeners import LISTENING_FILE
from sandbox_server.backends.agent_config import AgentEnvironment, agent_config
from sandbox_server.backends.agent_folder import unpack_agent
from sandbox_server.backends.agent_spawner import AgentSpawner
from sandbox_server.backends.base import BackendTraits, CreateContext, CreateFailed, Observation, ObservedState
from sandbox_server.backends.certificate import make_certificate
from sandbox_server.backends.disposal import delete_folders, delete_leftovers
from sandbox_server.backends.group import GROUP_PREFIX, join_group, kill_group, make_group, remove_groups_of, remove_stale_groups
from sandbox_server.backends.process_pipe import open_process_pipe
from sandbox_server.backends.processes import end_process, is_running
from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.pipe import Pipe
from sandbox_server.core.types import Handle, PoolSpec

LISTEN_WITHIN_S = 20.0
LISTEN_CHECK_INTERVAL_S = 0.02
TERM_S = 3.0
KILL_S = 5.0
DELETE_WITHIN_S = 2.0
#: The kernel's limit for the path of a unix socket is 107 bytes.
MAX_SOCKET_PATH_BYTES = 100
#: Where the socket goes if the paths of the state folder and of the folder for temporary files are too long.
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
LOOPBACK = "127.0.0.1"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
LOG_TAIL_BYTES = 2000
#: All sandboxes share this machine. One reset more than there are processors keeps them busy while another reset waits for something; each further one only
#: makes commands wait longer.
RESETS_AT_ONCE = len(os.sched_getaffinity(0)) + 1
#: So many commands begin at the same time without any of them having to wait for long.
ACQUIRES_AT_ONCE = 8 * len(os.sched_getaffinity(0))


class LocalBackend:
    """Creates sandboxes as child processes of the service, each in a session of its own, so that it can outlive the service.

    Args:
        folder: the folder that contains one folder per sandbox.
        owner: the owner that is recorded in each sandbox's handle.
        agent: returns the path of the agent, a zipapp or an unpacked one, and creates it if it does not exist.
        outlives_service: whether agents wait for another service to adopt them after this one has ended. They wait at most as long as a sandbox
            may live; otherwise they end after `agent_config.ALONE_EXIT_S`.
        term_s: how long an agent may take to end after SIGTERM before it gets SIGKILL, in seconds.
        transport: how the service reaches the agents that are created from now on: `unix`, `tls` or `stdio`.
        forks_agents: whether agents are forked while several sandboxes are created, see `AgentSpawner`.
    """

    name = "local"
    traits = BackendTraits(resets_at_once=RESETS_AT_ONCE, acquires_at_once=ACQUIRES_AT_ONCE)

    def __init__(
        self,
        folder: Path,
        owner: str,
        agent: Callable[[], Path],
        outlives_service: bool = False,
        term_s: float = TERM_S,
        transport: str = "unix",
        forks_agents: bool = False,
    ) -> None:
        self._folder = folder
        self._trash_folder = folder.parent / "trash"
        self._owner = owner
        self._agent = agent
        self._outlives_service = outlives_service
        self._term_s = term_s
        self._transport = transport
        self._spawner = AgentSpawner(_environment(), forks_agents)
        self._pinned_count = 0  # how many processors have been assigned to slots so far

    async def create(self, context: CreateContext) -> AsyncGenerator[Handle, None]:
        """Create a sandbox: first its folder, then its process; then wait until the process listens.

        Raises:
            CreateFailed: the sandbox could not be created. What has been yielded so far still has to be destroyed.
        """
        with self._spawner.count_creation():
            async with aclosing(self._create(context)) as handles:
                async for handle in handles:
                    yield handle

    async def _create(self, context: CreateContext) -> AsyncGenerator[Handle, None]:
        spec, sandbox_id = context.spec, context.sandbox_id
        if spec.dedicated:
            raise CreateFailed("the local backend has no dedicated sandboxes: they need an image of their own", permanent=True)
        await asyncio.to_thread(_check_exposed_paths, spec.local.expose)
        folder = self._folder / sandbox_id
        handle = Handle(backend=self.name, pool=context.pool_id.key, owner=self._owner, sandbox_id=sandbox_id, token=secrets.token_urlsafe(32))
        try:
            agent = await asyncio.to_thread(self._agent)
            self._spawner.start_forking(agent)  # It imports the agent while the checkpoints are written.
            folder.mkdir(mode=0o711, parents=True)
            yield self._write_checkpoint(handle)
            path, data = _choose_socket_path(folder)
            group = make_group(GROUP_PREFIX + sandbox_id)
            # The isolation mode `uid` keeps its slots there. An agent that is killed cannot delete them.
            data["workspaces"] = os.path.join(spec.workspace_base, sandbox_id)
            handle = replace(handle, data=data | ({"group": str(group)} if group is not None else {}))
            yield self._write_checkpoint(handle)
            handle, listen = await self._prepare_transport(handle, path, agent)
            config = agent_config(handle, spec, self._agent_environment(listen, folder / "base", spec))
            await self._spawner.wait_until_forking(agent)
            handle, stdin = self._spawn_agent(handle, agent)
            with stdin:
                yield self._write_checkpoint(handle)
                if group is not None:  # Before the agent has its configuration, so that everything that it starts is in the group.
                    await asyncio.to_thread(join_group, group, handle.data["pid"])
                await _send_config(stdin, config)
                await self._wait_until_listening(handle, path, stdin)
        except OSError as error:
            raise CreateFailed(f"sandbox {sandbox_id} could not be made: {error}") from error
        yield self._write_checkpoint(replace(handle, address=self._address_of(path, folder / "base")))

    async def _prepare_transport(self, handle: Handle, socket: Path, agent: Path) -> tuple[Handle, dict[str, Any]]:
        """Prepare what the transport needs beside the unix socket.

        Returns:
            The handle with what is needed to connect, and where the agent is to listen.
        """
        listen: dict[str, Any] = {"unix": str(socket)}
        if self._transport == "stdio":
            handle = replace(handle, data={**handle.data, "agent": str(agent)})
        elif self._transport == "tls":
            certificate = await asyncio.to_thread(make_certificate, handle.sandbox_id)
            listen["tls"] = {"host": LOOPBACK, "port": 0, "certificate": certificate.certificate, "key": certificate.key}
            handle = replace(handle, certificate=certificate.certificate)
        return handle, listen

    def _agent_environment(self, listen: dict[str, Any], base: Path, spec: PoolSpec) -> AgentEnvironment:
        first = self._pinned_count
        if spec.cpu is not None:
            self._pinned_count += spec.slots_per_sandbox * math.ceil(spec.cpu)
        return AgentEnvironment(
            listen=listen,
            base_dir=str(base),
            shares_machine=True,
            expose=spec.local.expose,
            outlives_service=self._outlives_service,
            first_processor=first,
        )

    def _address_of(self, socket: Path, base: Path) -> str:
        if self._transport != "tls":
            return f"{self._transport}:{socket}"
        host, port = json.loads((base / LISTENING_FILE).read_text(encoding="utf-8"))["tls"]
        return f"tls:{host}:{port}"

    async def open_pipe(self, handle: Handle) -> Pipe:
        """Start a relay to an agent that has a `stdio:` address.

        Raises:
            OSError: the relay could not be started.
        """
        assert handle.address is not None, "a relay needs an agent that listens"
        socket = handle.address.partition(":")[2]
        return await open_process_pipe([sys.executable, "-I", "-S", handle.data["agent"], "connect", socket], _environment())

    def _spawn_agent(self, handle: Handle, agent: Path) -> tuple[Handle, socket.socket]:
        """Start the agent, which then waits for its configuration.

        The caller writes the checkpoint without awaiting anything in between, so that there is never a process without a record.

        Returns:
            The handle with the process id, and the socket whose other end is the agent's standard input. The caller closes it.
        """
        log = os.open(self._folder / handle.sandbox_id / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        stdin, agent_end = socket.socketpair()
        try:
            with cleanup_on_failure(stdin.close):
                pid, started = self._spawner.spawn_agent(agent, agent_end.fileno(), log)
        finally:
            agent_end.close()
            os.close(log)
        return replace(handle, data={**handle.data, "pid": pid, "started": started}), stdin

    async def _wait_until_listening(self, handle: Handle, path: Path, stdin: socket.socket) -> None:
        """Wait until the agent has created its socket. It closes its standard input then, or when it ends.

        Raises:
            CreateFailed: it has ended, or does not listen in time.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LISTEN_WITHIN_S
        closed = asyncio.Event()
        loop.add_reader(stdin, closed.set)
        try:
            while not _exists(path):
                if not is_running(handle.data["pid"], handle.data["started"]):
                    raise CreateFailed(f"its agent ended at once: {self._log_tail(handle)}")
                if loop.time() > deadline:
                    raise CreateFailed(f"its agent did not listen within {LISTEN_WITHIN_S:g} s: {self._log_tail(handle)}")
                if closed.is_set():
                    loop.remove_reader(stdin)  # it stays readable
                    await asyncio.sleep(LISTEN_CHECK_INTERVAL_S)
                else:
                    with suppress(TimeoutError):
                        async with asyncio.timeout(LISTEN_CHECK_INTERVAL_S):
                            await closed.wait()
        finally:
            loop.remove_reader(stdin)

    def _log_tail(self, handle: Handle) -> str:
        with open(self._folder / handle.sandbox_id / "agent.log", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace").strip() or "its log is empty"

    def _write_checkpoint(self, handle: Handle) -> Handle:
        path = self._folder / handle.sandbox_id / "handle.json"
        partial = path.with_suffix(".new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(handle), file)
        partial.replace(path)
        return handle

    def _read_checkpoint(self, sandbox_id: str) -> Handle | None:
        try:
            return Handle(**json.loads((self._folder / sandbox_id / "handle.json").read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def destroy(self, handle: Handle) -> None:
        """End the agent, everything in its control group and everything that still starts a slot; then delete the sandbox's folders.

        Raises:
            OSError: something of the sandbox still exists; call again later.
        """
        # The checkpoint in the folder is at least as new as any handle that a caller has.
        data = (self._read_checkpoint(handle.sandbox_id) or handle).data
        if "pid" in data:
            await end_process(data["pid"], data["started"], self._term_s, KILL_S)
        if "group" in data:
            await asyncio.to_thread(kill_group, Path(data["group"]))
        # On a machine without a control group for the sandbox, an agent that was killed while it started a slot leaves bubblewrap processes behind.
        await asyncio.to_thread(kill_bwrap_processes, str(self._folder / handle.sandbox_id / "base"))
        if "pid" in data:
            await asyncio.to_thread(remove_groups_of, data["pid"])
        folders = filter(None, (data.get("workspaces"), data.get("socket_dir"), str(self._folder / handle.sandbox_id)))
        await delete_folders(folders, self._trash_folder, DELETE_WITHIN_S)

    async def observe(self, handles: Sequence[Handle]) -> Mapping[str, Observation]:
        """Report whether the sandboxes' agents run."""
        return {handle.sandbox_id: _observe_agent(handle) for handle in handles}

    async def list_owned(self, owner: str) -> Sequence[Handle]:
        """List every sandbox that has a folder, even if its checkpoint was never written.

        Also removes empty control groups, and deletes what an earlier service had moved to the trash.
        """
        await asyncio.to_thread(remove_stale_groups, GROUP_PREFIX)
        await delete_leftovers(self._trash_folder, 0.0)
        if not self._folder.is_dir():
            return []
        unrecorded = Handle(backend=self.name, pool="", owner=self._owner, sandbox_id="")
        found = (self._read_checkpoint(name) or replace(unrecorded, sandbox_id=name) for name in sorted(os.listdir(self._folder)))
        return [handle for handle in found if handle.owner == owner]

    async def close(self) -> None:
        """Do nothing: agents are in sessions of their own and run on."""


def _observe_agent(handle: Handle) -> Observation:
    if "pid" not in handle.data:
        return Observation(state=ObservedState.UNKNOWN, detail="its agent was not started yet")
    if is_running(handle.data["pid"], handle.data["started"]):
        return Observation(state=ObservedState.RUNNING)
    return Observation(state=ObservedState.GONE, detail=f"process {handle.data['pid']} has ended")


def _check_exposed_paths(paths: Sequence[str]) -> None:
    """Check that the paths which slots are to see exist.

    With a missing path no slot could be isolated by bubblewrap, and the agent would take a weaker mode for the best that this machine offers.

    Raises:
        CreateFailed: a path is not absolute or does not exist.
    """
    for path in paths:
        if not os.path.isabs(path):
            raise CreateFailed(f"local.expose: {path!r} is no absolute path: correct the pool's spec", permanent=True)
        if not os.path.exists(path):
            raise CreateFailed(f"local.expose: {path!r} is not there: make it, or take it out of the pool's spec", permanent=True)


def _choose_socket_path(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Choose the path of the agent's socket: in the sandbox's folder, or in a temporary folder if that path is too long.

    Returns:
        The path, and what `destroy` has to know about it.

    Raises:
        CreateFailed: no folder has a path that is short enough for a socket.
    """
    path = folder / "agent.sock"
    if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
        return path, {}
    for parent in (tempfile.gettempdir(), *SHORT_FOLDERS):
        longest = os.path.join(parent, "sandbox-pool-" + "x" * 8, "agent.sock")
        if len(os.fsencode(longest)) <= MAX_SOCKET_PATH_BYTES:
            with suppress(OSError):  # the folder does not exist or cannot be written: try the next one
                short = tempfile.mkdtemp(prefix="sandbox-pool-", dir=parent)
                return Path(short, "agent.sock"), {"socket_dir": short}
    tried = ", ".join((str(folder), tempfile.gettempdir(), *SHORT_FOLDERS))
    raise CreateFailed(f"its agent needs a socket with a path of at most {MAX_SOCKET_PATH_BYTES} bytes, and none of {tried} will do", permanent=True)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


async def _send_config(stdin: socket.socket, config: Mapping[str, Any]) -> None:
    """Send the waiting agent its configuration."""
    stdin.setblocking(False)
    # `_wait_until_listening` notices an agent that has ended already, and reports the end of its log.
    with suppress(BrokenPipeError, ConnectionResetError):
        await asyncio.get_running_loop().sock_sendall(stdin, json.dumps(config).encode())
        stdin.shutdown(socket.SHUT_WR)


def _environment() -> dict[str, str]:
    """The agent's environment variables. Of the service's own it gets those that bubblewrap and the interpreter are found by; slots get none of them."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", **kept}


def make_local_backend(state_dir: Path, owner: str, outlives_service: bool = False, transport: str = "unix") -> LocalBackend:
    """Make the local backend of a service.

    Slots share the machine with the service. So the service protects itself from the kernel's out-of-memory killer and raises its own priority.

    Args:
        state_dir: the service's state folder.
        owner: the owner that is recorded in each sandbox's handle.
        outlives_service: whether agents wait for another service to adopt them after this one has ended.
        transport: how the service reaches new agents: `unix`, `tls` or `stdio`.
    """
    protect_this_process()
    raise_priority()
    lock = threading.Lock()

    def agent() -> Path:
        with lock:
            return unpack_agent(content(), state_dir / "agent")

    return LocalBackend(state_dir / "sandboxes", owner, agent, outlives_service, transport=transport, forks_agents=True)

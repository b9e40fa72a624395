"""Sandboxes on this machine: each is an agent process of its own, reached over a unix socket in the state folder.

For tests and debugging the service can reach new agents over TLS or a relay's standard input and output instead, as it does with other backends.

STATE/sandboxes/SANDBOX_ID/handle.json   the last checkpoint
                           agent.sock    where the agent listens
                           agent.log     what it says
                           base/         the agent's own: slots, trash, spool
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import io
import json
import os
import secrets
import shutil
import sys
import tempfile
import threading
import zipfile
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from sandbox_server.agent.build import content
from sandbox_server.agent.init.oom_score import protect_this_process
from sandbox_server.agent.init.priority import raise_priority
from sandbox_server.agent.isolation.bwrap_processes import kill_bwrap_processes
from sandbox_server.agent.server.listeners import LISTENING_FILE
from sandbox_server.backends.base import CreateFailed, Health
from sandbox_server.backends.certificate import make_certificate
from sandbox_server.backends.disposal import dispose, sweep
from sandbox_server.backends.group import GROUP_PREFIX, join_group, kill_group, make_group, remove_groups_of, sweep_groups
from sandbox_server.backends.process_pipe import open_process_pipe
from sandbox_server.backends.processes import end_process, is_running, spawn
from sandbox_server.core.pipe import Pipe
from sandbox_server.core.types import Handle, PoolSpec

START_WITHIN_S = 20.0
LOOK_EVERY_S = 0.005
TERM_S = 3.0
KILL_S = 5.0
#: An agent whose service is gone, and that none will adopt, ends itself after so long.
ALONE_EXIT_S = 10.0
DELETE_WITHIN_S = 2.0
#: The kernel's limit on a unix socket's path is 107 bytes.
MAX_SOCKET_PATH_BYTES = 100
#: Where a socket goes whose state folder, and whose folder for temporary files, have too long a path.
SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
LOOPBACK = "127.0.0.1"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalBackend:
    """Makes sandboxes as child processes. They are in sessions of their own, so that they can outlive the service.

    Args:
        folder: where the sandboxes' folders are.
        owner: who they belong to.
        agent: gives the path of the agent, a zipapp or a folder like one, making it if need be.
        survives: whether sandboxes outlive the service, for another one to adopt. They do so at most as long as they may live; else for `ALONE_EXIT_S`.
        term_s: how long an agent may take over SIGTERM before SIGKILL, in seconds.
        transport: how the service talks to the agents that are made from now on: `unix`, `tls` or `stdio`.
    """

    name = "local"

    def __init__(self, folder: Path, owner: str, agent: Callable[[], Path], survives: bool = False, term_s: float = TERM_S, transport: str = "unix") -> None:
        self._folder = folder
        self._aside = folder.parent / "trash"
        self._owner = owner
        self._agent = agent
        self._survives = survives
        self._term_s = term_s
        self._transport = transport

    async def create(self, pool: str, spec: PoolSpec, sandbox_id: str) -> AsyncGenerator[Handle, None]:
        """Make one: its folder, then its process, then the process listens.

        Raises:
            CreateFailed: it could not be made; what was yielded so far still has to be destroyed.
        """
        if spec.dedicated:
            raise CreateFailed("the local backend has no dedicated sandboxes: they need an image of their own", permanent=True)
        await asyncio.to_thread(_check_exposed, spec.local.expose)
        folder = self._folder / sandbox_id
        handle = Handle(backend=self.name, pool=pool, owner=self._owner, sandbox_id=sandbox_id, token=secrets.token_urlsafe(32))
        try:
            folder.mkdir(mode=0o711, parents=True)
            yield self._checkpoint(handle)
            agent = await asyncio.to_thread(self._agent)
            socket, data = _socket_path(folder)
            group = make_group(GROUP_PREFIX + sandbox_id)
            # Where the mode `uid` puts its slots: an agent that is killed cannot take that away itself.
            data["workspaces"] = os.path.join(spec.workspace_base, sandbox_id)
            handle = replace(handle, data=data | ({"group": str(group)} if group is not None else {}))
            yield self._checkpoint(handle)
            config = _config(handle, spec, socket, folder / "base", survives=self._survives)
            handle = await self._prepare_transport(handle, config, agent)
            handle, stdin = self._spawn(handle, agent)
            try:
                yield self._checkpoint(handle)
            except BaseException:
                os.close(stdin)
                raise
            await asyncio.to_thread(_brief, stdin, config, group, handle.data["pid"])
            await self._listens(handle, socket)
        except OSError as error:
            raise CreateFailed(f"sandbox {sandbox_id} could not be made: {error}") from error
        yield self._checkpoint(replace(handle, address=self._address(socket, folder / "base")))

    async def _prepare_transport(self, handle: Handle, config: dict[str, Any], agent: Path) -> Handle:
        """Put into the agent's configuration, and on record, what the transport needs beside the unix socket."""
        if self._transport == "stdio":
            return replace(handle, data={**handle.data, "agent": str(agent)})
        if self._transport == "tls":
            made = await asyncio.to_thread(make_certificate, handle.sandbox_id)
            config["listen"]["tls"] = {"host": LOOPBACK, "port": 0, "certificate": made.certificate, "key": made.key}
            return replace(handle, certificate=made.certificate)
        return handle

    def _address(self, socket: Path, base: Path) -> str:
        if self._transport != "tls":
            return f"{self._transport}:{socket}"
        host, port = json.loads((base / LISTENING_FILE).read_text(encoding="utf-8"))["tls"]
        return f"tls:{host}:{port}"

    async def open_pipe(self, handle: Handle) -> Pipe:
        """Start a relay to the agent of a `stdio:` address.

        Raises:
            OSError: it could not be started.
        """
        assert handle.address is not None, "only an agent that listens is relayed to"
        socket = handle.address.partition(":")[2]
        return await open_process_pipe([sys.executable, "-I", "-S", handle.data["agent"], "connect", socket], _environment())

    def _spawn(self, handle: Handle, agent: Path) -> tuple[Handle, int]:
        """Start the agent, which waits for its configuration. In one step with the checkpoint that follows: no process without a record."""
        log = os.open(self._folder / handle.sandbox_id / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        reader, writer = os.pipe()
        try:
            pid, started = spawn([sys.executable, "-I", str(agent)], _environment(), reader, log)
        except BaseException:
            os.close(writer)
            raise
        finally:
            os.close(reader)
            os.close(log)
        return replace(handle, data={**handle.data, "pid": pid, "started": started}), writer

    async def _listens(self, handle: Handle, socket: Path) -> None:
        waited_s = 0.0
        while not _exists(socket):
            if not is_running(handle.data["pid"], handle.data["started"]):
                raise CreateFailed(f"its agent ended at once: {self._last_words(handle)}")
            if waited_s > START_WITHIN_S:
                raise CreateFailed(f"its agent did not listen within {START_WITHIN_S:g} s: {self._last_words(handle)}")
            await asyncio.sleep(LOOK_EVERY_S)
            waited_s += LOOK_EVERY_S

    def _last_words(self, handle: Handle) -> str:
        with open(self._folder / handle.sandbox_id / "agent.log", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - 2000))
            return log.read().decode(errors="replace").strip() or "it said nothing"

    def _checkpoint(self, handle: Handle) -> Handle:
        path = self._folder / handle.sandbox_id / "handle.json"
        partial = path.with_suffix(".new")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(handle), file)
        partial.replace(path)
        return handle

    def _read(self, sandbox_id: str) -> Handle | None:
        try:
            return Handle(**json.loads((self._folder / sandbox_id / "handle.json").read_text(encoding="utf-8")))
        except (FileNotFoundError, NotADirectoryError):
            return None

    async def destroy(self, handle: Handle) -> None:
        """End its process, whatever else is in its control group or still sets up a slot, and its folder.

        Raises:
            OSError: something of it is still there; try again.
        """
        # The folder's record is never older than a handle that somebody holds.
        data = (self._read(handle.sandbox_id) or handle).data
        if "pid" in data:
            await end_process(data["pid"], data["started"], self._term_s, KILL_S)
        if "group" in data:
            await asyncio.to_thread(kill_group, Path(data["group"]))
        # An agent that was killed while it started a slot, on a machine where it has no group of its own.
        await asyncio.to_thread(kill_bwrap_processes, str(self._folder / handle.sandbox_id / "base"))
        if "pid" in data:
            await asyncio.to_thread(remove_groups_of, data["pid"])
        folders = filter(None, (data.get("workspaces"), data.get("socket_dir"), str(self._folder / handle.sandbox_id)))
        await dispose(folders, self._aside, DELETE_WITHIN_S)

    async def check(self, handles: Sequence[Handle]) -> Mapping[str, Health]:
        """Whether their agents run."""
        return {handle.sandbox_id: self._health(handle) for handle in handles}

    def _health(self, handle: Handle) -> Health:
        if "pid" not in handle.data:
            return Health.UNKNOWN
        return Health.RUNNING if is_running(handle.data["pid"], handle.data["started"]) else Health.GONE

    async def list_owned(self, owner: str) -> Sequence[Handle]:
        """Every sandbox that has a folder here, also one whose record was never written. Takes away empty groups whose folder is gone with their service."""
        await asyncio.to_thread(sweep_groups, GROUP_PREFIX)
        await sweep(self._aside, 0.0)
        if not self._folder.is_dir():
            return []
        unrecorded = Handle(backend=self.name, pool="", owner=self._owner, sandbox_id="")
        found = (self._read(name) or replace(unrecorded, sandbox_id=name) for name in sorted(os.listdir(self._folder)))
        return [handle for handle in found if handle.owner == owner]

    async def close(self) -> None:
        """There is nothing to let go of: agents are in sessions of their own."""


def _check_exposed(paths: Sequence[str]) -> None:
    """See that what slots are to see is there: else no slot could be walled off with it, and a weaker isolation would be taken for the best there is.

    Raises:
        CreateFailed: one is not.
    """
    for path in paths:
        if not os.path.isabs(path):
            raise CreateFailed(f"local.expose: {path!r} is no absolute path: correct the pool's spec", permanent=True)
        if not os.path.exists(path):
            raise CreateFailed(f"local.expose: {path!r} is not there: make it, or take it out of the pool's spec", permanent=True)


def _socket_path(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Where the agent listens, and what `destroy` must know of it: in a deep state folder, a short path elsewhere.

    Raises:
        CreateFailed: there is no folder with a path short enough for a socket.
    """
    socket = folder / "agent.sock"
    if len(os.fsencode(socket)) <= MAX_SOCKET_PATH_BYTES:
        return socket, {}
    for parent in (tempfile.gettempdir(), *SHORT_FOLDERS):
        longest = os.path.join(parent, "sandbox-pool-" + "x" * 8, "agent.sock")
        if len(os.fsencode(longest)) <= MAX_SOCKET_PATH_BYTES:
            with suppress(OSError):  # not there, or not ours to write in: the next
                short = tempfile.mkdtemp(prefix="sandbox-pool-", dir=parent)
                return Path(short, "agent.sock"), {"socket_dir": short}
    tried = ", ".join((str(folder), tempfile.gettempdir(), *SHORT_FOLDERS))
    raise CreateFailed(f"its agent needs a socket with a path of at most {MAX_SOCKET_PATH_BYTES} bytes, and none of {tried} will do", permanent=True)


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _brief(stdin: int, config: Mapping[str, Any], group: Path | None, pid: int) -> None:
    """Put the waiting agent into its group, then tell it what it is. In this order: whatever it starts is in the group."""
    if group is not None:
        join_group(group, pid)
    # An agent that is dead already is noticed by who waits for it to listen, with its last words.
    with suppress(BrokenPipeError), os.fdopen(stdin, "wb") as pipe:
        pipe.write(json.dumps(config).encode())


def _config(handle: Handle, spec: PoolSpec, socket: Path, base: Path, *, survives: bool) -> dict[str, Any]:
    longest_s = spec.max_lifetime_s + spec.max_lease_s
    return {
        "sandbox_id": handle.sandbox_id,
        "token": handle.token,
        "listen": {"unix": str(socket)},
        "base_dir": str(base),
        "slots": spec.slots_per_sandbox,
        "isolation": "auto",
        "allow_none": spec.allow_none and not spec.require_sandbox,
        "local": True,
        "network": spec.slots_have_network,
        "limits": {
            "processes": spec.slot_processes,
            "memory_mb": spec.slot_memory_mb,
            "disk_mb": spec.slot_disk_mb,
            "max_file_mb": spec.max_file_mb,
            "cpu": spec.cpu,
        },
        "memory_mb": spec.memory_mb,
        "env_vars": dict(spec.env_vars),
        "expose": list(spec.local.expose),
        "workspace_base": spec.workspace_base,
        "alone_exit_s": longest_s if survives else ALONE_EXIT_S,
        "max_life_s": longest_s,
    }


def _environment() -> dict[str, str]:
    """The agent's environment: of the service's own only where to look for bubblewrap, and what the interpreter may need to start. Slots get none of it."""
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    return {"PATH": SYSTEM_PATH, "LANG": "C.UTF-8", **kept}


def make_local_backend(state_dir: Path, owner: str, survives: bool = False, transport: str = "unix") -> LocalBackend:
    """The local backend of a service with this state folder.

    Slots share the machine with the service, which is then the last the kernel kills for memory, and claims the processor before them.
    """
    protect_this_process()
    raise_priority()
    lock = threading.Lock()
    zipapp = functools.cache(content)  # what is in it cannot change under a running process

    def agent() -> Path:
        with lock:
            return _unpack_agent(zipapp(), state_dir / "agent")

    return LocalBackend(state_dir / "sandboxes", owner, agent, survives, transport=transport)


def _unpack_agent(zipapp: bytes, parent: Path) -> Path:
    """The agent as a folder, so that only the first one has to compile it. Named by what is in it: a newer service changes nothing under an older agent."""
    folder = parent / hashlib.sha256(zipapp).hexdigest()[:16]
    if not folder.exists():
        parent.mkdir(mode=0o700, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=parent))
        try:
            with zipfile.ZipFile(io.BytesIO(zipapp)) as archive:
                archive.extractall(partial)
            partial.replace(folder)
        except BaseException:
            # On a full disk each attempt would leave one more, until the room that comes free was full of them.
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return folder

"""What every isolation mode has in common: a slot's body, how its init is started and how its end is waited for."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import shutil
import socket
import subprocess
import sys
from typing import Any, Callable, Mapping, Protocol, Sequence

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS, agent_limit, slot_limit
from sandbox_server.agent.execution.init_client.init_link import InitLink
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.slot_runtime import CacheFolder, Dirs, SlotRuntime
from sandbox_server.agent.init import oom_score

START_TIMEOUT_S = 15.0
END_TIMEOUT_S = 10.0
_STDERR_BYTES = 4096
_BEHIND_CGROUP = 64
_EXIT_POLL_S = 0.005
UMASK = 0o022
SHM_BYTES = 256 << 20
SLOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INIT_CODE = "import sys; sys.path.insert(0, %r); from sandbox_server.agent.init.init import main; main()"


@dataclasses.dataclass(frozen=True)
class Context:
    """What all modes need to know about this agent."""

    config: AgentConfig
    slots_dir: str
    lib_dir: str
    filter: bytes
    shared_filter: bytes  # for modes whose slots share the machine's message queues
    processors: tuple[int, ...]
    sets_floor: bool = False  # whether this process may set the floor of a slot's `oom_score_adj`

    def affinity(self, turn: int) -> list[int]:
        """The processors a body is pinned to; empty: not pinned. Bodies take turns, so that they spread."""
        cpu = self.config.limits.cpu
        if cpu is None or math.ceil(cpu) >= len(self.processors):
            return []
        count = math.ceil(cpu)
        return [self.processors[(turn * count + number) % len(self.processors)] for number in range(count)]

    def environment(self, cores: int, workspace: str, tmp: str | None, cache: str | None = None) -> dict[str, str]:
        """What every process of a slot finds in its environment; `cores` 0: it is not pinned."""
        cores = cores or len(self.processors)
        env = {
            "PATH": SLOT_PATH,
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "HOME": workspace,
            "SANDBOX_WORKSPACE": workspace,
            "OMP_NUM_THREADS": str(cores),
            "PYTHON_CPU_COUNT": str(cores),
        }
        if tmp is not None:
            env["TMPDIR"] = tmp
        if cache is not None:
            env["SANDBOX_CACHE"] = cache
        env.update(self.config.env_vars)
        return env

    def rlimits(self, memory_by_cgroup: bool, processes_by_cgroup: bool) -> dict[str, int]:
        """Limits every process of a slot has. Where a cgroup does it better (it counts what it refuses), the rlimit is out of its way."""
        limits = self.config.limits
        processes = limits.processes + (_BEHIND_CGROUP if processes_by_cgroup else 0)
        values = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits.max_file_mb << 20, "RLIMIT_NPROC": processes, "RLIMIT_NOFILE": slot_limit(agent_limit())}
        if limits.memory_mb is not None and not memory_by_cgroup:
            values["RLIMIT_DATA"] = limits.memory_mb << 20
        return values


class Isolation(Protocol):
    """One isolation mode."""

    name: str
    networks: tuple[str, ...]
    places: str  # whether `/tmp`, `/dev/shm` and IPC are the slot's `own`, or `shared` with the machine and why; known when a slot was started
    caches: bool  # whether a slot can be given a shared cache, and be rid of it again

    async def start(self, slot_id: str, network: bool, keep: SlotRuntime | None = None, cache: CacheFolder | None = None) -> SlotRuntime:
        """Start a slot's body; with `keep`, on the folders (and the user) of a body that has ended; with `cache`, where the mode can, with that mounted.

        Raises:
            StartFailed: with the error it met.
        """

    async def end(self, body: SlotRuntime) -> dict[str, Any]:
        """Kill everything in the body and prove that nothing is left.

        Returns:
            The proof; `clean` is whether it holds, `detail` what does not.
        """

    def forget(self, body: SlotRuntime) -> None:
        """The body has ended, proven, and its folders are thrown away: what it occupied may be used again."""

    def close(self) -> None:
        """Every body has ended, and so does the agent."""


def find_shell() -> str:
    """The shell commands are run with."""
    for path in ("/bin/bash", "/usr/bin/bash"):
        if os.path.exists(path):
            return path
    found = shutil.which("bash", path=SLOT_PATH)
    if found is None:
        raise StartFailed("there is no bash on this machine")
    return found


def make_dirs(folder: str, uid: int | None) -> Dirs:
    """The empty folders of a new generation, owned by the slot's user."""
    os.makedirs(folder, mode=0o700)
    dirs = Dirs(root=folder, workspace=os.path.join(folder, "workspace"), tmp=os.path.join(folder, "tmp"))
    make_writable_dirs(dirs, uid)
    return dirs


def make_writable_dirs(dirs: Dirs, uid: int | None) -> None:
    """Make the folders that a slot writes, empty, owned by its user."""
    for path in (dirs.workspace, dirs.tmp):
        os.mkdir(path, 0o700)
        if uid is not None:
            os.chown(path, uid, uid)


def prove_dirs(dirs: Dirs, uid: int | None) -> str | None:
    """Whether a new generation is what it must be: empty, the slot's own, closed to others. None, or what is wrong."""
    for path in (dirs.workspace, dirs.tmp):
        info = os.lstat(path)
        if os.listdir(path):
            return "%s is not empty" % os.path.basename(path)
        if info.st_mode & 0o7777 != 0o700 or (uid is not None and info.st_uid != uid):
            return "%s has mode %o and owner %d" % (os.path.basename(path), info.st_mode & 0o7777, info.st_uid)
    return None


def init_argv(python: str, lib: str, control_fd: int) -> list[str]:
    """How init is started: isolated from the environment, from site packages, from user settings."""
    return [python, "-I", "-S", "-B", "-c", INIT_CODE % lib, str(control_fd)]


@dataclasses.dataclass
class Launched:
    """An init that serves."""

    process: subprocess.Popen[bytes]
    link: InitLink
    pid: int
    pidfd: int
    stderr_fd: int


def control_pair() -> tuple[socket.socket, socket.socket]:
    """The agent's and init's end of a control socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def launch(
    argv: Sequence[str],
    theirs: socket.socket,
    ours: socket.socket,
    init_config: Mapping[str, Any],
    join_fds: Sequence[int],
    env: Mapping[str, str] | None = None,
    sets_floor: bool = False,
    kill_rest: Callable[[], None] | None = None,
) -> Launched:
    """Start an init and wait until it serves. Through `join_fds` it joins its control groups before anything else.

    It inherits them: what is sent over a socket can be refused because of what other slots send.
    `kill_rest` is called in a thread when the start is given up and the process itself has ended: it kills what that has left.

    Raises:
        StartFailed: with what it said on its standard error or over the socket.
    """
    loop = asyncio.get_running_loop()
    stderr_r, stderr_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        try:
            # From the main thread: PDEATHSIG is bound to the thread that forks.
            process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr_w,
                pass_fds=(theirs.fileno(), *join_fds),
                env=dict(env or {}),
                cwd="/",
            )
        except OSError as error:
            ours.close()
            raise StartFailed("%s: %s" % (argv[0], error.strerror), temporary=error.errno in TEMPORARY_ERRORS) from None
        finally:
            os.close(stderr_w)
            theirs.close()
        link = InitLink(loop, ours)
        try:
            pid = await link.wait_until_ready(dict(init_config, join=list(join_fds)), START_TIMEOUT_S)
            pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
            if sets_floor:
                oom_score.set_floor(pid)
        except BaseException as error:
            link.close()
            process.kill()
            await wait_exit(process, END_TIMEOUT_S)
            if kill_rest is not None:
                await loop.run_in_executor(None, kill_rest)
            if isinstance(error, (StartFailed, OSError)):
                raise StartFailed(_with_stderr(str(error), stderr_r)) from None
            raise
        result = Launched(process, link, pid, pidfd, stderr_r)
        stderr_r = -1
        return result
    finally:
        if stderr_r >= 0:
            os.close(stderr_r)


def _with_stderr(text: str, fd: int) -> str:
    try:
        said = os.read(fd, _STDERR_BYTES).decode("utf-8", "replace").strip()
    except BlockingIOError:
        said = ""
    return "%s (%s)" % (said.splitlines()[-1], text) if said else text


async def wait_exit(process: subprocess.Popen[bytes], timeout_s: float) -> bool:
    """Wait for the end of a child of ours and reap it; whether it came in time."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while process.poll() is None:
        left = deadline - loop.time()
        if left <= 0:
            return False
        if hasattr(os, "pidfd_open"):
            fd = os.pidfd_open(process.pid)
            try:
                await wait_readable(fd, left)
            finally:
                os.close(fd)
        else:
            await asyncio.sleep(min(_EXIT_POLL_S, left))
    return True


def close_body_fds(body: SlotRuntime) -> None:
    """Let go of an ended body's descriptors."""
    for fd in (body.init_pidfd, body.stderr_fd):
        if fd >= 0:
            os.close(fd)
    body.init_pidfd = body.stderr_fd = -1


def interpreter() -> str:
    """The real path of the interpreter this agent runs on."""
    return os.path.realpath(sys.executable)

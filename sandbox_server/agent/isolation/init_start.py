"""Starts the init of a slot, waits until it serves requests, and waits for its end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import socket
import subprocess
from typing import Any, Callable, Mapping, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS
from sandbox_server.agent.execution.init_client.init_link import InitLink
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.slot_runtime import CacheFolder, ChildProcess, Dirs, SlotRuntime
from sandbox_server.agent.init import oom_score
from sandbox_server.agent.isolation.base import END_TIMEOUT_S
from sandbox_server.agent.kernel.cgroups import SlotGroups
from sandbox_server.agent.kernel.priority import set_slot_slice

START_TIMEOUT_S = 15.0
_STDERR_BYTES = 4096
_EXIT_POLL_S = 0.005
INIT_CODE = "import sys; sys.path.insert(0, %r); from sandbox_server.agent.init.init import main; main()"


def init_argv(python: str, lib: str, control_fd: int) -> list[str]:
    """Return the command line of init. The interpreter ignores environment variables, site packages and user settings.

    Args:
        python: the path of the interpreter.
        lib: the folder with the code of init.
        control_fd: the descriptor of init's end of the control socket.
    """
    return [python, "-I", "-S", "-B", "-c", INIT_CODE % lib, str(control_fd)]


@dataclasses.dataclass
class StartedInit:
    """An init that serves requests.

    Args:
        process: the child process of the agent: init, or bubblewrap.
        link: the control socket of init.
        pid: the process id of init as this agent sees it.
        pidfd: a pidfd of init, or -1 where the Python version has none.
        stderr_fd: the read end of its standard error, or -1 if init was forked.
    """

    process: ChildProcess
    link: InitLink
    pid: int
    pidfd: int
    stderr_fd: int

    def to_runtime(
        self,
        slot_id: str,
        dirs: Dirs,
        workspace: str,
        tmp: str,
        *,
        has_network: bool,
        uid: int | None,
        groups: SlotGroups,
        shell: str,
        has_pid_namespace: bool = False,
        cache: CacheFolder | None = None,
    ) -> SlotRuntime:
        """Return the slot runtime of this init. The arguments are described at `SlotRuntime`."""
        return SlotRuntime(
            slot_id=slot_id,
            dirs=dirs,
            workspace=workspace,
            tmp=tmp,
            has_network=has_network,
            process=self.process,
            link=self.link,
            init_pid=self.pid,
            init_pidfd=self.pidfd,
            has_pid_namespace=has_pid_namespace,
            uid=uid,
            groups=groups,
            shell=shell,
            stderr_fd=self.stderr_fd,
            cache=cache,
        )


def create_control_sockets() -> tuple[socket.socket, socket.socket]:
    """Create a control socket. Returns the end of the agent and the end of init."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


async def start_init(
    argv: Sequence[str],
    init_socket: socket.socket,
    agent_socket: socket.socket,
    init_config: Mapping[str, Any],
    join_fds: Sequence[int],
    env: Mapping[str, str] | None = None,
    sets_floor: bool = False,
    kill_rest: Callable[[], None] | None = None,
) -> StartedInit:
    """Start an init and wait until it serves requests.

    Args:
        argv: the command line.
        init_socket: the end of the control socket that init inherits. It is closed here.
        agent_socket: the end of the control socket that the agent uses.
        init_config: the configuration that is sent to init.
        join_fds: descriptors through which init joins its control groups before anything else. Init inherits them, because the kernel can refuse to send
            descriptors over a socket if other slots have many in flight.
        env: the environment of init; None for an empty one.
        sets_floor: whether the minimum `oom_score_adj` of the slot is set.
        kill_rest: called in a thread after a failed start, when the process itself has ended. It kills the processes that are left.

    Raises:
        StartFailed: the start failed; the text contains what init has reported over the socket or on its standard error.
    """
    stderr_r, stderr_w = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    started_init: StartedInit | None = None
    try:
        process = _spawn(argv, init_socket, agent_socket, stderr_w, join_fds, env)
        config = dict(init_config, join=list(join_fds))
        started_init = await wait_until_ready(process, agent_socket, config, stderr_r, sets_floor, kill_rest)
        return started_init
    finally:
        if started_init is None:
            os.close(stderr_r)


async def wait_until_ready(
    process: ChildProcess,
    agent_socket: socket.socket,
    init_config: dict[str, Any],
    stderr_r: int,
    sets_floor: bool,
    kill_rest: Callable[[], None] | None = None,
) -> StartedInit:
    """Send a process that becomes an init its configuration, and wait until it serves requests. If that fails, the process is killed.

    Args:
        process: the child process of the agent.
        agent_socket: the end of the control socket that the agent uses.
        init_config: the configuration.
        stderr_r: the read end of the standard error of the process, or -1.
        sets_floor: whether the minimum `oom_score_adj` of the slot is set.
        kill_rest: see `start_init`.

    Raises:
        StartFailed: the start failed; the text says why.
    """
    link = InitLink(asyncio.get_running_loop(), agent_socket)
    try:
        pid = await link.wait_until_ready(init_config, START_TIMEOUT_S)
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        set_slot_slice(pid)
        if sets_floor:
            oom_score.set_slot_floor(pid)
    except (StartFailed, OSError) as error:
        await _kill_failed_start(process, link, kill_rest)
        raise StartFailed(with_stderr(str(error), stderr_r)) from None
    except BaseException:  # also when this task is cancelled: no process may be left of the start
        await _kill_failed_start(process, link, kill_rest)
        raise
    return StartedInit(process, link, pid, pidfd, stderr_r)


async def _kill_failed_start(process: ChildProcess, link: InitLink, kill_rest: Callable[[], None] | None) -> None:
    link.close_link()
    process.kill()
    await wait_for_exit(process, END_TIMEOUT_S)
    if kill_rest is not None:
        await asyncio.get_running_loop().run_in_executor(None, kill_rest)


def _spawn(
    argv: Sequence[str], init_socket: socket.socket, agent_socket: socket.socket, stderr_w: int, join_fds: Sequence[int], env: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start the process, and close the descriptors that only the child needs. If that fails, `agent_socket` is closed as well."""
    try:
        # This runs in the main thread, because the parent-death signal of the child is bound to the thread that forks.
        return subprocess.Popen(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr_w,
            pass_fds=(init_socket.fileno(), *join_fds),
            env=dict(env or {}),
            cwd="/",
        )
    except OSError as error:
        agent_socket.close()
        raise StartFailed("%s: %s" % (argv[0], error.strerror), temporary=error.errno in TEMPORARY_ERRORS) from None
    finally:
        os.close(stderr_w)
        init_socket.close()


def with_stderr(text: str, fd: int) -> str:
    """Return an error with the last line that a process has written to its standard error, whose non-blocking read end is `fd`, or -1 if there is none."""
    if fd < 0:
        return text
    try:
        output = os.read(fd, _STDERR_BYTES).decode("utf-8", "replace").strip()
    except BlockingIOError:
        output = ""
    return "%s (%s)" % (output.splitlines()[-1], text) if output else text


async def wait_for_exit(process: ChildProcess, timeout_s: float) -> bool:
    """Wait until a child process has ended, and reap it.

    Returns:
        Whether it has ended within `timeout_s` seconds.
    """
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


def close_runtime_fds(runtime: SlotRuntime) -> None:
    """Close the descriptors of an ended runtime."""
    for fd in (runtime.init_pidfd, runtime.stderr_fd):
        if fd >= 0:
            os.close(fd)
    runtime.init_pidfd = runtime.stderr_fd = -1

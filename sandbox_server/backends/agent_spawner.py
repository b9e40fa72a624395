"""Starts the processes of agents. While several sandboxes are created at the same time, their agents are forked from a process that has imported the agent.

Half of the processor time of an agent's start is for its imports.
"""

from __future__ import annotations

import array
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from sandbox_server.agent.spawner import ANSWER, REQUEST
from sandbox_server.backends.processes import spawn, start_time

log = logging.getLogger(__name__)

#: How long the forking process may take to import the agent, in seconds.
READY_WITHIN_S = 10.0
#: How long one fork may take, in seconds. The event loop waits for it, as it waits for the start of a program.
FORK_WITHIN_S = 2.0
#: From so many creations at the same time on, agents are forked.
FORK_FROM_CREATIONS = 2


class AgentSpawner:
    """Starts agents as children of this process.

    Args:
        environment: the environment variables of agents.
        forks: whether agents are ever forked. Only the agent that this service builds can be.
    """

    def __init__(self, environment: Mapping[str, str], forks: bool) -> None:
        self._environment = environment
        self._forks = forks
        self._creation_count = 0
        self._forking: dict[Path, asyncio.Task[_ForkingProcess | None]] = {}
        self._executed: set[Path] = set()

    @contextmanager
    def count_creation(self) -> Iterator[None]:
        """Count a creation of a sandbox as under way. With the end of the last one, the forking process ends."""
        self._creation_count += 1
        try:
            yield
        finally:
            self._creation_count -= 1
            if not self._creation_count:
                self._end_forking()

    def _end_forking(self) -> None:
        for task in self._forking.values():
            task.cancel()
            if task.done() and not task.cancelled() and (process := task.result()) is not None:
                process.end()
        self._forking.clear()
        self._executed.clear()

    def _stop_forking(self, agent: Path, process: _ForkingProcess) -> None:
        """End a process that has failed. Until the last of the creations that are under way has ended, agents are executed."""
        process.end()
        del self._forking[agent]
        self._executed.add(agent)

    def start_forking(self, agent: Path) -> None:
        """Start the process that forks agents, if several sandboxes are created now and it does not run yet.

        Args:
            agent: the path of the agent.
        """
        is_wanted = self._forks and self._creation_count >= FORK_FROM_CREATIONS
        if is_wanted and agent not in self._executed and agent not in self._forking:
            self._forking[agent] = asyncio.create_task(_start_forking(agent, self._environment))

    async def wait_until_forking(self, agent: Path) -> None:
        """Wait until agents can be forked, or it is known that they cannot, if `start_forking` has started the process.

        Args:
            agent: the path of the agent.
        """
        if (task := self._forking.get(agent)) is not None:
            await asyncio.shield(task)

    def spawn_agent(self, agent: Path, stdin: int, output: int) -> tuple[int, int]:
        """Start an agent: by a fork, if `wait_until_forking` has found that possible, or by executing its interpreter.

        Args:
            agent: the path of the agent.
            stdin: the descriptor of its standard input.
            output: the descriptor of its standard output and standard error.

        Returns:
            Its pid and start time.

        Raises:
            OSError: it could not be started.
        """
        task = self._forking.get(agent)
        if task is not None and task.done() and not task.cancelled() and (process := task.result()) is not None:
            try:
                pid = process.fork_agent(stdin, output)
                return pid, start_time(pid) or 0
            except NotForked as error:
                log.warning("agents are executed one by one: %s", error)
                self._stop_forking(agent, process)
            except OSError:  # An executed agent would share its standard input with one that may have been forked.
                self._stop_forking(agent, process)
                raise
        return spawn([sys.executable, "-I", "-S", "-B", str(agent)], self._environment, stdin, output)


class NotForked(Exception):
    """An agent was not forked. It can be executed instead."""


class _ForkingProcess:
    """A process that has imported the agent.

    Args:
        pid: its process id.
        sock: the service's end of its socket.
    """

    def __init__(self, pid: int, sock: socket.socket) -> None:
        self._pid = pid
        self._sock = sock

    def fork_agent(self, stdin: int, output: int) -> int:
        """Fork an agent, and return its process id.

        Raises:
            NotForked: the process has not forked it.
            OSError: the process did not answer. An agent that it has forked nevertheless ends when its standard input ends without a configuration.
        """
        self._sock.settimeout(FORK_WITHIN_S)
        try:
            self._sock.sendmsg([REQUEST], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [stdin, output]))])
        except OSError as error:
            raise NotForked(f"process {self._pid}, which forks agents, cannot be reached: {error}") from error
        answer = self._sock.recv(ANSWER.size)
        if len(answer) != ANSWER.size:
            raise OSError(f"process {self._pid}, which forks agents, has ended while it forked one")
        pid: int = ANSWER.unpack(answer)[0]
        if pid <= 0:
            raise NotForked(f"process {self._pid} could not fork an agent: {os.strerror(-pid)}")
        return pid

    def end(self) -> None:
        """End the process and reap it. The agents that it has forked run on."""
        self._sock.close()
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._pid, signal.SIGKILL)  # It is not reaped before, so no other process has its id.
            os.waitpid(self._pid, 0)


async def _start_forking(agent: Path, environment: Mapping[str, str]) -> _ForkingProcess | None:
    """Start a process that forks agents. Returns None, and logs why, if agents must be executed instead."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process: _ForkingProcess | None = None
    try:
        # The socket is its standard input as well as its output, so that it inherits no other descriptor.
        pid, _ = spawn([sys.executable, "-I", "-S", "-B", str(agent), "spawn", "0"], environment, theirs.fileno(), 2)
        theirs.close()  # The end of the process must be the end of the socket.
        process = _ForkingProcess(pid, ours)
        ours.setblocking(False)
        async with asyncio.timeout(READY_WITHIN_S):
            ready = await asyncio.get_running_loop().sock_recv(ours, ANSWER.size)
        if not ready:
            raise OSError("it ended before it was ready")
    except (OSError, TimeoutError) as error:
        log.warning("agents are executed one by one, because no process could be started that forks them: %s", str(error) or "it was not ready in time")
        if process is not None:
            process.end()
        return None
    except BaseException:  # also when this task is cancelled
        if process is not None:
            process.end()
        raise
    else:
        return process
    finally:
        theirs.close()
        if process is None:
            ours.close()

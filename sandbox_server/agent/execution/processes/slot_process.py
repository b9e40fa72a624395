"""One process that init starts in a slot for the agent, with all its descendants: its pipes, its control group, its end."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any, Callable, Protocol, Sequence

from sandbox_server.agent.execution.init_client.init_link import memfd
from sandbox_server.agent.execution.processes import process_kill
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.processes.pipe_size import LARGE_PIPE_BYTES, PIPE_BYTES, enlarge_pipe
from sandbox_server.agent.execution.processes.spawn_spec import TTY, SpawnSpec
from sandbox_server.agent.execution.processes.stdin_pipe import StdinPipe
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.leaf_groups import Leaf
from sandbox_server.agent.wire import DATA_BYTES

_READ_BYTES = 64 << 10
_WATCH_OUTPUT_AFTER_S = 0.01
_FLOOD_PAUSE_S = 0.002
_READS_AT_EXIT = 20  # a pipe holds at most 1 MiB, so this many reads empty it


class Writable(Protocol):
    """A receiver of output. `is_full`: the receiver discards most of what is written from now on, so reading may be slow."""

    @property
    def is_full(self) -> bool: ...

    def write(self, data: bytes) -> None:
        """Receive some output."""


class ProcessListener(Protocol):
    """Receives what happens to one `SlotProcess`."""

    def on_still_running(self) -> None:
        """The process has not ended at once. Called at most once, and not where the owner reads the output."""

    def on_output(self) -> None:
        """Some output was read."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """The first process of the tree has ended; its descendants may still run.

        Args:
            status: as `os.wait4` returns it.
            cpu_s: the processor time of the process and of the children that it has waited for, in seconds.
            max_rss_bytes: the largest resident set of one of them, in bytes.
        """

    def on_process_refused(self, errno: int, step: str) -> None:
        """The process could not be started: with which errno, and at which step of starting it."""

    def on_init_lost(self, detail: str) -> None:
        """Init has ended, and all processes of the slot with it."""


def _ignore_leaf(leaf: Leaf) -> None:
    """Do nothing: the owner of the process does not measure it."""


class SlotProcess:
    """A process in a slot, and its descendants, from the request to start it to the end of them all.

    Output is read in one of two ways. With `outputs`, the event loop reads it as it comes and writes it there. Without, the owner reads it with
    `try_read_output` and `wait_for_output` as fast as it can pass it on, and a full pipe makes the process wait (backpressure).

    A process whose `stdio` is `tty` has no pipes: its owner receives the master of its terminal from `terminal_socket`.

    Args:
        runtime: the slot runtime in which the process runs.
        drains: takes over the pipes that descendants keep open after the process has ended.
        outputs: the receiver of standard output and standard error; or two receivers, one for each; or none, see above.
        listener: receives what happens to the process.
    """

    __slots__ = (
        "_drains",
        "_end_waiters",
        "_is_pulled",
        "_listener",
        "_loop",
        "_output_fds",
        "_outputs",
        "_paused_timers",
        "_spawn_id",
        "_watch_timer",
        "is_over",
        "killed_cpu_s",
        "leaf",
        "runtime",
        "stdin",
        "terminal_socket",
    )  # fmt: skip

    def __init__(self, runtime: SlotRuntime, drains: Drains, outputs: Sequence[Writable], listener: ProcessListener) -> None:
        self.runtime = runtime
        self._drains = drains
        self._outputs = outputs
        self._is_pulled = not outputs
        self._listener = listener
        self._loop = asyncio.get_event_loop()
        self._output_fds: list[int] = []
        self._spawn_id = 0
        self.stdin: StdinPipe | None = None
        self.terminal_socket: socket.socket | None = None
        self.leaf: Leaf | None = None
        self.is_over = False  # init has reported the end of the first process, or there never was one
        self.killed_cpu_s = 0.0  # the processor time that init has counted for the processes that `end_tree` killed, in seconds
        self._end_waiters: list[asyncio.Future[None]] = []
        self._watch_timer: asyncio.TimerHandle | None = None
        self._paused_timers: dict[int, asyncio.TimerHandle] = {}

    def start_process(self, spec: SpawnSpec, on_leaf_taken: Callable[[Leaf], None] = _ignore_leaf) -> None:
        """Ask init to start the process. What becomes of it is reported to the listener.

        Args:
            spec: what to start.
            on_leaf_taken: called with the control group of the process before init can start it; not called if it has none of its own.

        Raises:
            OSError: the agent has no descriptors left for its pipes.
        """
        if spec.stdio == TTY:
            self._start_with_terminal(spec)
            return
        names = ["out", "err"] if len(self._outputs) > 1 else ["out"]
        agent_fds: list[int] = []
        process_fds: list[int] = []
        stdin_fd = -1
        try:
            for _ in names:
                agent_fds.append(self._open_output_pipe(process_fds))
            if spec.has_stdin_pipe:
                stdin_fd = _open_stdin_pipe(process_fds)
                names.append("in")
            _add_memory_files(spec, names, process_fds)
            _add_given_descriptors(spec, names, process_fds)
            self._spawn_id = self._send_request(spec, names, process_fds, on_leaf_taken)
        except BaseException:  # not even a defect may leave descriptors open: the agent runs for a long time
            for fd in agent_fds if stdin_fd < 0 else [*agent_fds, stdin_fd]:
                os.close(fd)
            raise
        finally:
            for fd in process_fds:
                os.close(fd)
        self._output_fds = agent_fds
        if stdin_fd >= 0:
            self.stdin = StdinPipe(stdin_fd)
        if not self._is_pulled:
            # Most commands end before this timer expires, and are spared the cost of registering their pipes with the event loop, and of other timers.
            self._watch_timer = self._loop.call_later(_WATCH_OUTPUT_AFTER_S, self._watch_output)

    def _start_with_terminal(self, spec: SpawnSpec) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._spawn_id = self._send_request(spec, ["tty"], [its.fileno()])
        except BaseException:  # not even a defect may leave descriptors open: the agent runs for a long time
            ours.close()
            raise
        finally:
            its.close()
        ours.setblocking(False)
        self.terminal_socket = ours

    def _send_request(self, spec: SpawnSpec, names: Sequence[str], process_fds: Sequence[int], on_leaf_taken: Callable[[Leaf], None] = _ignore_leaf) -> int:
        """Ask init to start the process with these descriptors, each of which has a name. Returns the spawn id."""
        move_fd = self._take_leaf(spec)
        if self.leaf is not None:
            on_leaf_taken(self.leaf)
        if move_fd >= 0:
            names, process_fds = [*names, "cgroup"], [*process_fds, move_fd]
        try:
            return self.runtime.link.start_process({**spec.request, "fds": list(names)}, process_fds, self)
        except BaseException:  # otherwise the group would count as in use until the slot runtime ends
            self.release_leaf()
            self.leaf = None
            raise

    def _open_output_pipe(self, process_fds: list[int]) -> int:
        """Open a pipe for output, and add its write end to the descriptors of the process. Returns the read end."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        process_fds.append(write_fd)
        os.set_blocking(read_fd, False)
        if self.runtime.uid is not None:
            os.fchown(write_fd, self.runtime.uid, self.runtime.uid)  # otherwise the process could not open /dev/stdout
        return read_fd

    def _take_leaf(self, spec: SpawnSpec) -> int:
        """Choose the control group of the process. Returns the descriptor through which init must move into it, -1 if init need not move."""
        leaves = self.runtime.groups.leaves
        if leaves is None or not spec.has_own_group:
            return -1
        self.leaf, move_fd = leaves.take_leaf()
        return move_fd

    # Output that the event loop reads.

    def _watch_output(self) -> None:
        for index, fd in enumerate(self._output_fds):
            if fd >= 0:
                self._loop.add_reader(fd, self._read_some, index, _READ_BYTES)
        self._watch_timer = None
        self._listener.on_still_running()

    def _read_some(self, index: int, most_bytes: int) -> None:
        fd = self._output_fds[index]
        try:
            data = os.read(fd, most_bytes)
        except BlockingIOError:
            return
        if data:
            self._outputs[index].write(data)
            self._listener.on_output()
            if self._outputs[index].is_full:
                self._pause_reading(index, fd, len(data))
        else:
            self._close_output(index)

    def _pause_reading(self, index: int, fd: int, size_bytes: int) -> None:
        """Limit the time that the agent spends on output that is discarded anyway. A larger pipe still lets hundreds of MB a second through."""
        if size_bytes == _READ_BYTES:
            enlarge_pipe(fd)
        self._loop.remove_reader(fd)
        self._paused_timers[index] = self._loop.call_later(_FLOOD_PAUSE_S, self._resume_reading, index)

    def _resume_reading(self, index: int) -> None:
        del self._paused_timers[index]
        self._loop.add_reader(self._output_fds[index], self._read_some, index, LARGE_PIPE_BYTES)

    def poll_output(self) -> None:
        """Read some of what has been written so far. A pipe whose reading is paused is skipped: it has just been read."""
        for index, fd in enumerate(self._output_fds):
            if fd >= 0 and index not in self._paused_timers:
                self._read_some(index, _READ_BYTES)

    def read_all_output(self) -> None:
        """Read what is in the pipes now, and go on reading afterwards."""
        for index, fd in enumerate(self._output_fds):
            if fd >= 0:
                self._empty_pipe(index, fd)

    def collect_output(self) -> None:
        """Read what is in the pipes now, then stop reading: a pipe that nobody can write to any more is closed, any other is handed to the drains."""
        for index, fd in enumerate(self._output_fds):
            if fd >= 0 and not self._empty_pipe(index, fd):
                self._forget_pipe(index)
                self._drains.add_pipe(fd)
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        self.release_leaf()

    def release_leaf(self) -> None:
        """Let another process have the control group of this one, once the group is empty."""
        if self.leaf is not None:
            self.leaf.is_in_use = False

    def _empty_pipe(self, index: int, fd: int) -> bool:
        """Read what is in a pipe now. Returns True if nobody can write to it any more; it is closed then."""
        for _ in range(_READS_AT_EXIT):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self._close_output(index)
                return True
            self._outputs[index].write(data)
        return False

    def _close_output(self, index: int) -> None:
        fd = self._output_fds[index]
        self._forget_pipe(index)
        os.close(fd)

    def _forget_pipe(self, index: int) -> None:
        timer = self._paused_timers.pop(index, None)
        if timer is not None:
            timer.cancel()
        elif self._watch_timer is None:
            self._loop.remove_reader(self._output_fds[index])
        self._output_fds[index] = -1

    # Output that the owner reads.

    def try_read_output(self) -> bytes | None:
        """Return some output; empty bytes if all of it has been read; None if there is none now."""
        try:
            data = os.read(self._output_fds[0], DATA_BYTES)
        except BlockingIOError:
            return None
        if len(data) == PIPE_BYTES:
            enlarge_pipe(self._output_fds[0])  # this is much content, and a larger pipe costs both sides fewer wake-ups
        return data

    async def wait_for_output(self, timeout_s: float) -> bool:
        """Wait until there is output, or its end. Returns False if that takes more than `timeout_s` seconds."""
        return await wait_readable(self._output_fds[0], timeout_s)

    def close_output(self) -> None:
        """Stop reading. A process that still writes gets SIGPIPE."""
        os.close(self._output_fds[0])
        self._output_fds[0] = -1

    # The end.

    async def end_tree(self, term_grace_s: float = process_kill.TERM_GRACE_S) -> dict[str, Any]:
        """End the process and all its descendants: SIGTERM, then SIGKILL; all processes of the slot if init does not help.

        Args:
            term_grace_s: how long the processes have to end after SIGTERM, in seconds; 0: they get no SIGTERM.

        Returns:
            The evidence: which signal ended them, and how many processes are left.

        Raises:
            OSError: the request to init could not be sent.
        """
        evidence, self.killed_cpu_s = await process_kill.end_process_tree(self.runtime, self.leaf, self._spawn_id, term_grace_s)
        return evidence

    async def kill_process(self, timeout_s: float) -> None:
        """Kill the tree with SIGKILL and wait for the end of its first process; end all processes of the slot if that takes more than `timeout_s` seconds.

        Raises:
            OSError: the request to init could not be sent.
        """
        await process_kill.kill_process(self.runtime, self._spawn_id, self.wait_until_over, timeout_s)

    async def wait_until_over(self, timeout_s: float) -> bool:
        """Wait until init has reported how the first process ended. Returns False if that takes more than `timeout_s` seconds."""
        if self.is_over:
            return True
        over: asyncio.Future[None] = self._loop.create_future()
        self._end_waiters.append(over)
        try:
            await asyncio.wait_for(over, timeout_s)
        except asyncio.TimeoutError:
            return False
        finally:
            self._end_waiters.remove(over)
        return True

    def _set_over(self) -> None:
        self.is_over = True
        for over in self._end_waiters:
            if not over.done():
                over.set_result(None)

    # The reports of init.

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `init_link.SpawnListener`."""
        self._set_over()
        self._listener.on_process_ended(status, cpu_s, max_rss_bytes)

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `init_link.SpawnListener`."""
        self._set_over()
        self._listener.on_process_refused(errno, step)

    def on_init_lost(self, detail: str) -> None:
        """See `init_link.SpawnListener`."""
        self._set_over()
        self._listener.on_init_lost(detail)


def _open_stdin_pipe(process_fds: list[int]) -> int:
    """Open the pipe of the standard input, and add its read end to the descriptors of the process. Returns the write end."""
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    process_fds.append(read_fd)
    os.set_blocking(write_fd, False)
    return write_fd


def _add_memory_files(spec: SpawnSpec, names: list[str], process_fds: list[int]) -> None:
    """Add what the process reads and what is known beforehand, as files in memory."""
    for name, content in (("in", spec.stdin), ("script", spec.script)):
        if content is not None:
            process_fds.append(memfd(name, content))
            names.append(name)


def _add_given_descriptors(spec: SpawnSpec, names: list[str], process_fds: list[int]) -> None:
    """Add what the caller has opened for the process."""
    for name, fd in (("in", spec.stdin_fd), ("script", spec.script_fd)):
        if fd is not None:
            process_fds.append(os.dup(fd))
            names.append(name)

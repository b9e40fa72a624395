"""One tree of processes that init runs for the agent: its pipes, its leaf, its end."""

from __future__ import annotations

import asyncio
import fcntl
import os
from typing import Any, Protocol, Sequence

from sandbox_server.agent.execution.drains import Drains
from sandbox_server.agent.execution.init_client.init_link import memfd
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.leaf_groups import Leaf

_READ_BYTES = 64 << 10
_F_SETPIPE_SZ = 1031  # fcntl has the name from Python 3.10 on
_LISTEN_AFTER_S = 0.01
_REPORT_POLL_S = 0.002
_FLOOD_PAUSE_S = 0.002
_FLOOD_PIPE_BYTES = 256 << 10
_READS_AT_EXIT = 20  # a pipe holds at most 1 MiB, so this empties what the ended process has written


class Writable(Protocol):
    """Where output goes. `full`: it is only counted any more, so there is no hurry."""

    @property
    def full(self) -> bool: ...

    def write(self, data: bytes) -> None:
        """Take some."""


class ProcessListener(Protocol):
    """Who hears how a run goes."""

    def wrote(self) -> None:
        """There was output."""

    def ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """The first process has ended; what it wrote has been read."""

    def refused(self, number: int, where: str) -> None:
        """It could not be started: the errno, and at which step."""

    def init_lost(self, detail: str) -> None:
        """Init has gone, and with it the whole slot."""


class ProcessTree:
    """A run from request to end.

    Args:
        body: where it runs.
        drains: who takes the pipes that outlive it.
        outputs: where its standard output goes, and as a second entry its standard error where that is apart.
        owner: hears how it goes.
    """

    __slots__ = ("_drains", "_fds", "_listening", "_loop", "_outputs", "_owner", "_resting", "body", "killed_cpu_s", "leaf", "number", "over")

    def __init__(self, body: SlotRuntime, drains: Drains, outputs: Sequence[Writable], owner: ProcessListener) -> None:
        self.body = body
        self._drains = drains
        self._outputs = outputs
        self._owner = owner
        self._loop = asyncio.get_event_loop()
        self._fds: list[int] = []
        self.leaf: Leaf | None = None
        self.number = 0
        self.over = False
        self.killed_cpu_s = 0.0  # what its tree had used when it was killed, where init found and counted it
        self._listening: asyncio.TimerHandle | None = None
        self._resting: dict[int, asyncio.TimerHandle] = {}

    def start(self, request: dict[str, Any], stdin: bytes | None, script: bytes | None = None, stdin_fd: int = -1) -> None:
        """Send the request; the outcome comes through the owner.

        Args:
            request: `spawn` or `fork`, without descriptors.
            stdin: what the process reads; None with no `stdin_fd`: nothing.
            script: what it finds at descriptor 3.
            stdin_fd: a pipe's end to read from instead; stays the caller's.
        """
        names = ["out"]
        ours: list[int] = []
        theirs: list[int] = []
        try:
            for _ in self._outputs:
                read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
                ours.append(read_fd)
                theirs.append(write_fd)
                os.set_blocking(read_fd, False)
                if self.body.uid is not None:
                    os.fchown(write_fd, self.body.uid, self.body.uid)  # or it could not open /dev/stdout
            if len(self._outputs) > 1:
                names.append("err")
            for name, content in (("in", stdin), ("script", script)):
                if content is not None:
                    names.append(name)
                    theirs.append(memfd(name, content))
            passed = list(theirs)
            if stdin_fd >= 0:
                names.append("in")
                passed.append(stdin_fd)
            leaves = self.body.groups.leaves
            if leaves is not None:
                self.leaf, move_fd = leaves.take_leaf()
                if move_fd >= 0:
                    names.append("cgroup")
                    passed.append(move_fd)
            request["fds"] = names
            self.number = self.body.link.start(request, passed, self)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self._fds = ours
        self._listening = self._loop.call_later(_LISTEN_AFTER_S, self._listen)

    def _listen(self) -> None:
        """Most commands end sooner than this and never cost a registration."""
        for which, fd in enumerate(self._fds):
            if fd >= 0:
                self._loop.add_reader(fd, self._readable, which)
        self._listening = None

    def _readable(self, which: int) -> None:
        self._take(which, _READ_BYTES)

    def _take(self, which: int, most: int) -> None:
        fd = self._fds[which]
        try:
            data = os.read(fd, most)
        except BlockingIOError:
            return
        if data:
            self._outputs[which].write(data)
            self._owner.wrote()
            if self._outputs[which].full:
                self._rest(which, fd, len(data))
        else:
            self._close(which)

    def _rest(self, which: int, fd: int, size: int) -> None:
        """A flood that nobody keeps gets a bounded share of this process's time; a wider pipe keeps it going at hundreds of MB a second."""
        if size == _READ_BYTES:
            try:
                fcntl.fcntl(fd, _F_SETPIPE_SZ, _FLOOD_PIPE_BYTES)
            except OSError:
                pass  # this user has as many pipes as it may have wide ones
        self._loop.remove_reader(fd)
        self._resting[which] = self._loop.call_later(_FLOOD_PAUSE_S, self._resume, which)

    def _resume(self, which: int) -> None:
        del self._resting[which]
        self._loop.add_reader(self._fds[which], self._readable_wide, which)

    def _readable_wide(self, which: int) -> None:
        self._take(which, _FLOOD_PIPE_BYTES)

    def poll(self) -> None:
        """Read some of what has been written by now; a pipe that rests has just been read."""
        for which, fd in enumerate(self._fds):
            if fd >= 0 and which not in self._resting:
                self._take(which, _READ_BYTES)

    def _close(self, which: int) -> None:
        fd = self._fds[which]
        self._let_go(which)
        os.close(fd)

    def _let_go(self, which: int) -> None:
        resting = self._resting.pop(which, None)
        if resting is not None:
            resting.cancel()
        elif self._listening is None:
            self._loop.remove_reader(self._fds[which])
        self._fds[which] = -1

    def collect(self) -> None:
        """Read what is in the pipes now, then let them go: closed when nobody writes any more, drained where somebody still could."""
        for which, fd in enumerate(self._fds):
            if fd >= 0:
                self._collect(which, fd)
        if self._listening is not None:
            self._listening.cancel()
        if self.leaf is not None:
            self.leaf.live = False

    def _collect(self, which: int, fd: int) -> None:
        for _ in range(_READS_AT_EXIT):
            try:
                data = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self._close(which)
                return
            self._outputs[which].write(data)
        self._let_go(which)
        self._drains.add(fd)

    async def reported(self, timeout_s: float) -> None:
        """Wait, not for long, until init has said how the first process ended: it says what the run used."""
        deadline = self._loop.time() + timeout_s
        while not self.over and self._loop.time() < deadline:
            await asyncio.sleep(_REPORT_POLL_S)

    # What init says.

    def exited(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `init_link.Listener`."""
        self.over = True
        self._owner.ended(status, cpu_s, max_rss_bytes)

    def refused(self, number: int, where: str) -> None:
        """See `init_link.Listener`."""
        self.over = True
        self._owner.refused(number, where)

    def init_lost(self, detail: str) -> None:
        """See `init_link.Listener`."""
        self.over = True
        self._owner.init_lost(detail)

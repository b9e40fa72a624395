"""Measures what a running call uses of the processor, by the control groups of its tree and of its slot."""

from __future__ import annotations

import asyncio
import os
from typing import Any, NamedTuple

from sandbox_server.agent.kernel.cgroups import Leaf
from sandbox_server.agent.kernel.processor_share import ProcessorAccount, ProcessorTimes
from sandbox_server.agent.kernel.slot_limits import find_number

_FIRST_LOOK_S = 0.01  # most commands end sooner, and never cost a look
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_LOOKS_BEFORE_DEADLINE = 8
_MOST_TASKS = 256
_FILE_BYTES = 4096
_NICE, _POLICY = 16, 38  # of what follows the name in /proc/PID/stat


class ProcessorWatch:
    """Looks at one call from shortly after its start until it is closed.

    Args:
        leaf: the group of the call's tree.
        share: how many processors the slot is promised.
        init_pid: the first process of the slot, which has the processors that the slot may use.
        timeout_s: of the call; the shorter, the more often it is looked at.
    """

    def __init__(self, leaf: Leaf, share: float, init_pid: int, timeout_s: float) -> None:
        self._loop = asyncio.get_event_loop()
        self._leaf = leaf
        self._share = share
        self._init_pid = init_pid
        self._pause_s = max(_SHORTEST_PAUSE_S, min(_LONGEST_PAUSE_S, timeout_s / _LOOKS_BEFORE_DEADLINE))
        self._used_fd = self._waited_fd = self._slot_fd = self._slot_waited_fd = -1
        self._used_before_s = 0.0
        self._waited_before_process_s = 0.0
        self._account: ProcessorAccount | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(_FIRST_LOOK_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        try:
            self._used_fd = os.open(os.path.join(self._leaf.path, "cpu.stat"), os.O_RDONLY | os.O_CLOEXEC)
            self._used_before_s = _used_s(self._used_fd)
            slot = os.path.dirname(self._leaf.path)
            self._slot_fd = os.open(os.path.join(slot, "cpu.stat"), os.O_RDONLY | os.O_CLOEXEC)
            self._waited_fd = os.open(os.path.join(self._leaf.path, "cpu.pressure"), os.O_RDONLY | os.O_CLOEXEC)
            self._slot_waited_fd = os.open(os.path.join(slot, "cpu.pressure"), os.O_RDONLY | os.O_CLOEXEC)
            self._account = ProcessorAccount(self._share, self._look())
        except OSError:
            return  # no descriptor is left, or this kernel does not count who waits: nothing is proven
        self._timer = self._loop.call_later(self._pause_s, self._again)

    def _again(self) -> None:
        self._add()
        self._timer = self._loop.call_later(self._pause_s, self._again)

    def _add(self) -> None:
        if self._account is not None:
            self._account.add(self._look())

    def _look(self) -> ProcessorTimes:
        pids = self._leaf.pids()
        waited_s = self._waited_s(pids)
        return ProcessorTimes(self._loop.time(), _used_s(self._used_fd), waited_s, _used_s(self._slot_fd), self._is_lowered(pids))

    def _is_lowered(self, pids: list[int]) -> bool:
        tasks = _tasks_of(pids)
        if len(tasks) > _MOST_TASKS:
            return True  # those that cannot all be looked at could hide what asks for less
        ordinary = _claim_of(self._init_pid)
        claims = [_claim_of(task) for task in tasks]
        return ordinary is not None and any(claim is not None and claim.is_below(ordinary) for claim in claims)

    def _waited_s(self, pids: list[int]) -> float:
        """How long the call has waited for a processor: itself, and until it has a process, the slot, whose init is to start one and is in no known leaf."""
        own_s = _waited_s(self._waited_fd)
        if self._slot_waited_fd >= 0:
            self._waited_before_process_s = _waited_s(self._slot_waited_fd) - own_s
            if any(pid != self._init_pid for pid in pids):
                os.close(self._slot_waited_fd)
                self._slot_waited_fd = -1
        return self._waited_before_process_s + own_s

    def used_s(self) -> float:
        """The processor time of the call's tree since it was first looked at; 0 where nothing counts it."""
        return _used_s(self._used_fd) - self._used_before_s if self._used_fd >= 0 else 0.0

    def starved(self) -> dict[str, Any] | None:
        """The proof that others kept the call from its slot's share of the processor until now; None where there is none."""
        if self._account is None:
            return None
        self._add()
        return self._account.starved()

    def close(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in (self._used_fd, self._waited_fd, self._slot_fd, self._slot_waited_fd):
            if fd >= 0:
                os.close(fd)
        self._used_fd = self._waited_fd = self._slot_fd = self._slot_waited_fd = -1
        self._account = self._timer = None


def _used_s(fd: int) -> float:
    return find_number(os.pread(fd, _FILE_BYTES, 0), b"usage_usec") / 1e6


def _waited_s(fd: int) -> float:
    """How long something of a group was ready to run and waited, from its `cpu.pressure`."""
    for line in os.pread(fd, _FILE_BYTES, 0).splitlines():
        if line.startswith(b"some "):
            return int(line.rpartition(b"total=")[2]) / 1e6
    return 0.0


def _tasks_of(pids: list[int]) -> list[int]:
    """The threads of some processes; more than `_MOST_TASKS` only in so far as that there are more."""
    tasks: list[int] = []
    for pid in pids:
        try:
            tasks += [int(name) for name in os.listdir("/proc/%d/task" % pid)]
        except OSError:
            continue  # it has ended
        if len(tasks) > _MOST_TASKS:
            break
    return tasks


class _Claim(NamedTuple):
    """What a thread asks of the scheduler beside others."""

    nice: int
    policy: int
    session_nice: int
    processors: frozenset[int]

    def is_below(self, other: _Claim) -> bool:
        return (
            self.nice > other.nice or self.policy != other.policy or self.session_nice > other.session_nice or self.processors < other.processors
        )  # fmt: skip


def _claim_of(task: int) -> _Claim | None:
    """The claim of a thread; None where it has ended."""
    fields = _read("/proc/%d/stat" % task).rpartition(b")")[2].split()
    session_nice = _read("/proc/%d/autogroup" % task).split()[-1:] or [b"0"]
    try:
        return _Claim(int(fields[_NICE]), int(fields[_POLICY]), int(session_nice[0]), frozenset(os.sched_getaffinity(task)))
    except (IndexError, ProcessLookupError):
        return None


def _read(path: str) -> bytes:
    """A file of /proc; nothing where its process has ended, or the kernel has no such file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""

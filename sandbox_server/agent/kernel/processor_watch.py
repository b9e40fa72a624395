"""Measures the processor time of a running call from the control groups of the call and of its slot."""

from __future__ import annotations

import asyncio
import os
from typing import Any, NamedTuple

from sandbox_server.agent.kernel.leaf_groups import Leaf
from sandbox_server.agent.kernel.processor_share import ProcessorAccount, ProcessorTimes
from sandbox_server.agent.kernel.slot_limit_groups import find_number

_FIRST_SAMPLE_AFTER_S = 0.01  # Most commands end earlier and cost no measurement.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0
_SAMPLES_BEFORE_DEADLINE = 8
_MAX_TASKS = 256
_FILE_BYTES = 4096
_NICE, _POLICY = 16, 38  # Positions of the fields after the process name in /proc/PID/stat.


class ProcessorWatch:
    """Measures one call periodically, from shortly after its start until `stop_watch`.

    Args:
        leaf: the control group of the call.
        share: how many processors the slot is promised.
        init_pid: the first process of the slot. Its processor affinity is that of the slot.
        timeout_s: the time limit of the call, in seconds. The shorter it is, the more often the call is measured.
    """

    def __init__(self, leaf: Leaf, share: float, init_pid: int, timeout_s: float) -> None:
        self._loop = asyncio.get_event_loop()
        self._leaf = leaf
        self._share = share
        self._init_pid = init_pid
        self._pause_s = max(_MIN_PAUSE_S, min(_MAX_PAUSE_S, timeout_s / _SAMPLES_BEFORE_DEADLINE))
        self._used_fd = self._waited_fd = self._slot_fd = self._slot_waited_fd = -1
        self._used_before_s = 0.0
        self._waited_before_process_s = 0.0
        self._account: ProcessorAccount | None = None
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(_FIRST_SAMPLE_AFTER_S, self._begin)

    def _begin(self) -> None:
        self._timer = None
        try:
            self._used_fd = os.open(os.path.join(self._leaf.path, "cpu.stat"), os.O_RDONLY | os.O_CLOEXEC)
            self._used_before_s = _read_used_s(self._used_fd)
            slot = os.path.dirname(self._leaf.path)
            self._slot_fd = os.open(os.path.join(slot, "cpu.stat"), os.O_RDONLY | os.O_CLOEXEC)
            self._waited_fd = os.open(os.path.join(self._leaf.path, "cpu.pressure"), os.O_RDONLY | os.O_CLOEXEC)
            self._slot_waited_fd = os.open(os.path.join(slot, "cpu.pressure"), os.O_RDONLY | os.O_CLOEXEC)
            self._account = ProcessorAccount(self._share, self._measure())
        except OSError:
            return  # No descriptor is left, or this kernel does not count waiting times: there will be no evidence.
        self._timer = self._loop.call_later(self._pause_s, self._sample_periodically)

    def _sample_periodically(self) -> None:
        self._add_sample()
        self._timer = self._loop.call_later(self._pause_s, self._sample_periodically)

    def _add_sample(self) -> None:
        if self._account is not None:
            self._account.add_measurement(self._measure())

    def _measure(self) -> ProcessorTimes:
        pids = self._leaf.pids()
        waited_s = self._call_waited_s(pids)
        return ProcessorTimes(self._loop.time(), _read_used_s(self._used_fd), waited_s, _read_used_s(self._slot_fd), self._is_lowered(pids))

    def _is_lowered(self, pids: list[int]) -> bool:
        tasks = _tasks_of(pids)
        if len(tasks) > _MAX_TASKS:
            return True  # Not all threads can be checked, and an unchecked one may have a lowered priority.
        ordinary = _read_scheduling(self._init_pid)
        settings = [_read_scheduling(task) for task in tasks]
        return ordinary is not None and any(setting is not None and setting.is_below(ordinary) for setting in settings)

    def _call_waited_s(self, pids: list[int]) -> float:
        """Return how long the call has waited for a processor, in seconds.

        Until the call has a process, the waiting time of the whole slot counts as well: init, which starts the process, may be in another leaf.
        """
        own_s = _read_waited_s(self._waited_fd)
        if self._slot_waited_fd >= 0:
            self._waited_before_process_s = _read_waited_s(self._slot_waited_fd) - own_s
            if any(pid != self._init_pid for pid in pids):
                os.close(self._slot_waited_fd)
                self._slot_waited_fd = -1
        return self._waited_before_process_s + own_s

    def used_s(self) -> float:
        """Return the processor time of the call since the first measurement, in seconds; 0 if it cannot be measured here."""
        return _read_used_s(self._used_fd) - self._used_before_s if self._used_fd >= 0 else 0.0

    def starvation_evidence(self) -> dict[str, Any] | None:
        """Return the evidence that other slots or processes kept the call from the share of its slot until now; None if there is no such evidence."""
        if self._account is None:
            return None
        self._add_sample()
        return self._account.starvation_evidence()

    def stop_watch(self) -> None:
        """Stop measuring and close the files."""
        if self._timer is not None:
            self._timer.cancel()
        for fd in (self._used_fd, self._waited_fd, self._slot_fd, self._slot_waited_fd):
            if fd >= 0:
                os.close(fd)
        self._used_fd = self._waited_fd = self._slot_fd = self._slot_waited_fd = -1
        self._account = self._timer = None


def _read_used_s(fd: int) -> float:
    return find_number(os.pread(fd, _FILE_BYTES, 0), b"usage_usec") / 1e6


def _read_waited_s(fd: int) -> float:
    """Return how long at least one process of a group was ready to run and waited, in seconds, from its `cpu.pressure`."""
    for line in os.pread(fd, _FILE_BYTES, 0).splitlines():
        if line.startswith(b"some "):
            return int(line.rpartition(b"total=")[2]) / 1e6
    return 0.0


def _tasks_of(pids: list[int]) -> list[int]:
    """Return the threads of some processes. The list is incomplete if it has more than `_MAX_TASKS` elements."""
    tasks: list[int] = []
    for pid in pids:
        try:
            tasks += [int(name) for name in os.listdir("/proc/%d/task" % pid)]
        except OSError:
            continue  # The process has ended.
        if len(tasks) > _MAX_TASKS:
            break
    return tasks


class _SchedulingSettings(NamedTuple):
    """The scheduling settings of a thread that determine its part of the processor."""

    nice: int
    policy: int
    session_nice: int
    processors: frozenset[int]

    def is_below(self, other: _SchedulingSettings) -> bool:
        return (
            self.nice > other.nice or self.policy != other.policy or self.session_nice > other.session_nice or self.processors < other.processors
        )  # fmt: skip


def _read_scheduling(task: int) -> _SchedulingSettings | None:
    """Return the scheduling settings of a thread; None if it has ended."""
    fields = _read("/proc/%d/stat" % task).rpartition(b")")[2].split()
    session_nice = _read("/proc/%d/autogroup" % task).split()[-1:] or [b"0"]
    try:
        return _SchedulingSettings(int(fields[_NICE]), int(fields[_POLICY]), int(session_nice[0]), frozenset(os.sched_getaffinity(task)))
    except (IndexError, ProcessLookupError):
        return None


def _read(path: str) -> bytes:
    """Read a file of /proc. Returns no bytes if its process has ended or the kernel does not have the file."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return b""

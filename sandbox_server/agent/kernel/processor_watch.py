"""Measures the processor time of a running call from the control groups of the call and of its slot."""

from __future__ import annotations

import asyncio
import os
from typing import Any, NamedTuple

from sandbox_server.agent.kernel.leaf_groups import Leaf
from sandbox_server.agent.kernel.processor_share import ProcessorAccount, ProcessorTimes

_FIRST_SAMPLE_AFTER_S = 0.1  # Most commands end earlier, also where many run at once, and cost no measurement.
_SAMPLES_MISSED_FRACTION = 1 / 16  # Of the time limit: the first measurement is never later, so that it misses little of a call that times out.
_COUNTED_AFTER_S = 0.01  # A call that ends earlier costs no reading of what its remaining descendants have used.
_MIN_PAUSE_S, _MAX_PAUSE_S = 0.1, 1.0
_SAMPLES_BEFORE_DEADLINE = 8
_MAX_TASKS = 256
_NICE, _POLICY = 16, 38  # Positions of the fields after the process name in /proc/PID/stat.


class ProcessorWatch:
    """Measures one call periodically, from `start_watch` until `stop_watch`. It counts the processor time from the start of the call.

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
        self._started = self._loop.time()
        self._used_before_s = self._read_used_before_s()
        self._waited_before_process_s = 0.0
        self._has_process = False
        self._account: ProcessorAccount | None = None
        self._first_at = self._started + min(_FIRST_SAMPLE_AFTER_S, timeout_s * _SAMPLES_MISSED_FRACTION)
        self._timer: asyncio.TimerHandle | None = None

    def start_watch(self) -> None:
        """Begin to measure: the call has not ended at once."""
        self._timer = self._loop.call_at(self._first_at, self._begin)

    def _read_used_before_s(self) -> float | None:
        try:
            return self._leaf.processor_times.read_used_s()
        except OSError:
            return None  # No descriptor is left.

    def _begin(self) -> None:
        self._timer = None
        try:
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
        used_s, slot_used_s = self._leaf.processor_times.read_used_s(), self._leaf.slot_processor_times.read_used_s()
        return ProcessorTimes(self._loop.time(), used_s, waited_s, slot_used_s, self._is_lowered(pids))

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
        own_s = self._leaf.processor_times.read_waited_s()
        if not self._has_process:
            self._waited_before_process_s = self._leaf.slot_processor_times.read_waited_s() - own_s
            self._has_process = any(pid != self._init_pid for pid in pids)
        return self._waited_before_process_s + own_s

    def used_s(self) -> float:
        """Return the processor time of the call so far, in seconds; 0 if the call has just begun, or if it cannot be measured here."""
        if self._used_before_s is None or self._loop.time() - self._started < _COUNTED_AFTER_S:
            return 0.0
        try:
            return self._leaf.processor_times.read_used_s() - self._used_before_s
        except OSError:
            return 0.0  # The slot has been ended, and its control groups have been removed.

    def starvation_evidence(self) -> dict[str, Any] | None:
        """Return the evidence that other slots or processes kept the call from the share of its slot until now; None if there is no such evidence."""
        if self._account is None:
            return None
        self._add_sample()
        return self._account.starvation_evidence()

    def stop_watch(self) -> None:
        """Stop measuring."""
        if self._timer is not None:
            self._timer.cancel()
        self._used_before_s = self._account = self._timer = None


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

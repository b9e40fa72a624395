"""The progress of `process` and `evaluate`: lines on standard error while groups are rolled out, on terminals and in files alike."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from environments.rollouts.statistics import RolloutStatistics, Tally

#: The shortest time between two lines, in seconds.
MIN_INTERVAL_S = 5.0
#: The longest time without a line while nothing changes, in seconds.
MAX_INTERVAL_S = 30.0
_PROGRESS = re.compile(r"\w+: \d+/[\d?]+ (groups|items) done, ")


def _write_to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


class RunProgress:
    """Reports how far a run is.

    Args:
        name: the name of the environment, with which each line begins.
        statistics: what the rollouts have come to so far.
        write: writes a line.
        min_interval_s: the shortest time between two lines, in seconds.
        max_interval_s: the longest time without a line, in seconds.
    """

    def __init__(
        self,
        name: str,
        statistics: RolloutStatistics,
        *,
        write: Callable[[str], None] = _write_to_stderr,
        min_interval_s: float = MIN_INTERVAL_S,
        max_interval_s: float = MAX_INTERVAL_S,
    ) -> None:
        self._name = name
        self._statistics = statistics
        self._write = write
        self._min_interval_s = min_interval_s
        self._max_interval_s = max_interval_s
        #: How many groups the run has, or how many items are evaluated.
        self.total_count = 0
        self.unit = "groups"
        self._began_s = self._written_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Write lines during a block, and one at its end if a rollout has ended."""
        self._began_s = self._written_s = time.monotonic()
        self._statistics.on_change = self._schedule_line
        self._timer = asyncio.get_running_loop().call_later(self._max_interval_s, self._write_line)
        try:
            yield
        finally:
            self._statistics.on_change = None
            self._timer.cancel()
            if self._statistics.total.has_ended_rollouts:
                self._write(self.describe())

    def describe(self) -> str:
        """Return the line for the present state."""
        return describe_progress(self._name, self._statistics.total, self.total_count, self.unit, time.monotonic() - self._began_s)

    def _schedule_line(self) -> None:
        """Write a line as soon as the shortest interval is over."""
        assert self._timer is not None
        due_s = self._written_s + self._min_interval_s - time.monotonic()
        self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(max(0.0, due_s), self._write_line)

    def _write_line(self) -> None:
        self._written_s = time.monotonic()
        self._write(self.describe())
        self._timer = asyncio.get_running_loop().call_later(self._max_interval_s, self._write_line)


def describe_progress(name: str, tally: Tally, total_count: int, unit: str, elapsed_s: float) -> str:
    """Return how far a run is, in one line.

    Args:
        name: the name of the environment.
        tally: what the rollouts have come to so far.
        total_count: how many groups or items the run has.
        unit: `groups` or `items`.
        elapsed_s: how long the run has taken so far, in seconds.
    """
    waiting_count = tally.rewarded_count - tally.rewards.count - tally.dropped_count
    parts = [
        f"{tally.group_count}/{total_count or '?'} {unit} done",
        f"{tally.rewards.count} rollouts scored" + (f" and {waiting_count} more of groups that still run" if waiting_count else ""),
        f"{sum(tally.faults.values()) + tally.dropped_count} not scored",
    ]
    if tally.rewards.count:
        parts.append(f"mean reward {tally.rewards.mean:.3f}")
    return f"{name}: {', '.join(parts)}, after {elapsed_s:.0f} s"


def is_progress(line: str) -> bool:
    """Return whether a line of an environment's output is one about its progress."""
    return _PROGRESS.match(line) is not None

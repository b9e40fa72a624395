"""What the rollouts of a process came to: rewards, tool calls, time for each phase, faults, and what was repeated or dropped."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from environments.rollouts.exec_tool import RolloutFault
from environments.rollouts.trajectory import PHASES, TrajectoryRecord

#: How many of the latest errors of tool calls are kept with their details.
_MAX_ERROR_DETAILS = 50
#: How much of an error, or of the arguments of its call, is kept.
_DETAIL_CHARACTERS = 300
#: The phases that are spent on the sandbox and not on the model or its work.
_SANDBOX_PHASES = ("acquire", "set-up", "narrow", "release")


@dataclass(slots=True)
class Distribution:
    """The number, mean and range of some values."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0
    smallest: float = math.inf
    largest: float = -math.inf

    def add(self, value: float) -> None:
        """Add a value."""
        self.count += 1
        self.total += value
        self.squares += value * value
        self.smallest, self.largest = min(self.smallest, value), max(self.largest, value)

    @property
    def mean(self) -> float:
        """The mean; 0 if there are no values."""
        return self.total / self.count if self.count else 0.0

    @property
    def deviation(self) -> float:
        """The standard deviation; 0 if there are no values."""
        return math.sqrt(max(0.0, self.squares / self.count - self.mean**2)) if self.count else 0.0


@dataclass(slots=True)
class Tally:
    """Sums over the rollouts of some time.

    Args:
        rewards: the rewards of the scored rollouts.
        turns: how many turns they had.
        finished_count: how many of them the model ended itself.
        ends: why their agent loops ended.
        phase_s: how long all attempts together spent in each phase, in seconds.
        tool_calls: how many tool calls were `attempted`, `schema_valid`, `executed_ok` and `exec_error`.
        tool_errors: how many calls of each tool failed.
        tool_faults: how many calls ended with each fault and reason.
        faults: how many attempts were lost through each fault and reason.
        lost_s: how long the attempts had taken that were lost, in seconds.
        repeated_count: how many rollouts were begun again in a new slot.
        dropped_count: how many rollouts were dropped because their group stayed incomplete.
        cancelled_count: how many rollouts were cancelled.
        ambiguous_scored_count: how many rollouts were scored despite an `ambiguous` fault.
        cut_count: how many scored rollouts were cut to the maximum number of tokens.
        group_count: how many groups are complete.
        lost_group_count: how many groups came to nothing.
        rewarded_count: how many rollouts have a reward, also those of groups that still run.
        put_back_count: how many items of such groups are used once more.
        unusable_rows: why a row cannot be used, by its name.
    """

    rewards: Distribution = field(default_factory=Distribution)
    turns: Distribution = field(default_factory=Distribution)
    finished_count: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    phase_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    tool_calls: Counter[str] = field(default_factory=Counter)
    tool_errors: Counter[str] = field(default_factory=Counter)
    tool_faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost_s: float = 0.0
    repeated_count: int = 0
    dropped_count: int = 0
    cancelled_count: int = 0
    ambiguous_scored_count: int = 0
    cut_count: int = 0
    group_count: int = 0
    lost_group_count: int = 0
    rewarded_count: int = 0
    put_back_count: int = 0
    unusable_rows: dict[str, str] = field(default_factory=dict)

    @property
    def has_ended_rollouts(self) -> bool:
        """Whether an attempt at a rollout has ended, with or without a reward."""
        return bool(self.rewarded_count or self.faults or self.lost_group_count)

    @property
    def sandbox_s(self) -> float:
        """How long the rollouts waited for their sandboxes, in seconds: acquire, set-up, narrowing and release."""
        return sum(self.phase_s[phase] for phase in _SANDBOX_PHASES)

    def add_attempt(self, record: TrajectoryRecord) -> None:
        """Add what every attempt has, however it ended."""
        for phase in PHASES:
            self.phase_s[phase] += record.phase_s[phase]
        self.tool_faults += record.tool_faults
        if record.result is not None:
            result = record.result
            self.tool_calls["attempted"] += result.tool_calls_attempted
            self.tool_calls["schema_valid"] += result.tool_calls_schema_valid
            self.tool_calls["executed_ok"] += result.tool_calls_executed_ok
            self.tool_calls["exec_error"] += result.tool_calls_exec_error
            self.tool_errors.update(error.tool or "(no name)" for error in result.tool_errors)

    def add_scored(self, record: TrajectoryRecord) -> None:
        """Add a rollout that was scored."""
        assert record.reward is not None
        self.rewards.add(record.reward)
        self.ambiguous_scored_count += record.ambiguous_but_scored
        if record.result is not None:
            self.turns.add(record.result.turns_used)
            self.finished_count += record.result.finished_naturally
            self.ends[record.result.end.value] += 1

    def add_fault(self, record: TrajectoryRecord, fault: RolloutFault) -> None:
        """Add an attempt that was lost."""
        self.faults[fault.fault, fault.reason] += 1
        self.lost_s += sum(record.phase_s.values())


class RolloutStatistics:
    """What the rollouts of a process came to, since its start and since the last report."""

    def __init__(self) -> None:
        #: Since the start.
        self.total = Tally()
        #: Since the last call of `take_metrics`.
        self.window = Tally()
        #: The fault of the attempt that was lost last; None if none was.
        self.latest_fault: RolloutFault | None = None
        #: Called after each change, if it is set.
        self.on_change: Callable[[], None] | None = None
        self._error_details: deque[str] = deque(maxlen=_MAX_ERROR_DETAILS)

    @property
    def _tallies(self) -> tuple[Tally, Tally]:
        return self.total, self.window

    def record_scored(self, record: TrajectoryRecord) -> None:
        """Record a rollout that was scored."""
        self._keep_error_details(record)
        for tally in self._tallies:
            tally.add_attempt(record)
            tally.add_scored(record)
        self._report_change()

    def record_fault(self, record: TrajectoryRecord, fault: RolloutFault) -> None:
        """Record an attempt that was lost through no fault of the model."""
        self.latest_fault = fault
        self._keep_error_details(record)
        for tally in self._tallies:
            tally.add_attempt(record)
            tally.add_fault(record, fault)
        self._report_change()

    def record_dropped(self, record: TrajectoryRecord) -> None:
        """Record a rollout that could be scored, and whose group came to nothing."""
        self._keep_error_details(record)
        for tally in self._tallies:
            tally.add_attempt(record)
            tally.dropped_count += 1
        self._report_change()

    def record_cancelled(self, record: TrajectoryRecord) -> None:
        """Record an attempt that was cancelled."""
        for tally in self._tallies:
            tally.add_attempt(record)
            tally.cancelled_count += 1

    def record_unusable_row(self, row: str, reason: str) -> None:
        """Record a row that cannot be used."""
        for tally in self._tallies:
            tally.unusable_rows[row] = reason

    def count(self, **increments: int) -> None:
        """Add to counters of the tallies, such as `repeated_count=1`."""
        for tally in self._tallies:
            for name, increment in increments.items():
                setattr(tally, name, getattr(tally, name) + increment)
        if any(increments.values()):
            self._report_change()

    def take_metrics(self) -> dict[str, Any]:
        """Return the metrics since the last call, for Weights & Biases, and begin anew."""
        tally, self.window = self.window, Tally()
        details = list(self._error_details)
        self._error_details.clear()
        return {**_metrics(tally), "train/tool_error_details": "\n".join(details)}

    def _report_change(self) -> None:
        if self.on_change is not None:
            self.on_change()

    def _keep_error_details(self, record: TrajectoryRecord) -> None:
        if record.result is None:
            return
        for error in record.result.tool_errors:
            arguments, text = error.arguments[:_DETAIL_CHARACTERS], error.error[:_DETAIL_CHARACTERS]
            self._error_details.append(f"{record.trajectory_id} turn {error.turn} {error.tool}({arguments}): {text}")


def _metrics(tally: Tally) -> dict[str, float]:
    rollout_count = max(1, tally.rewards.count)
    metrics: dict[str, float] = {
        "train/tool_errors_count": sum(tally.tool_errors.values()),
        "train/lost_to_faults_s": tally.lost_s,
        "train/sandbox_time_s": tally.sandbox_s,
        "train/rollouts_repeated": tally.repeated_count,
        "train/rollouts_dropped": tally.dropped_count,
        "train/rollouts_cancelled": tally.cancelled_count,
        "train/rollouts_ambiguous_scored": tally.ambiguous_scored_count,
        "train/rollouts_cut": tally.cut_count,
        "train/groups": tally.group_count,
        "train/groups_lost": tally.lost_group_count,
        "train/rows_unusable": len(tally.unusable_rows),
    }
    for name in ("attempted", "schema_valid", "executed_ok", "exec_error"):
        metrics[f"train/tool_calls_{name}"] = tally.tool_calls[name]
    for tool, count in tally.tool_errors.items():
        metrics[f"train/tool_errors/{tool}"] = count
    for phase in PHASES:
        metrics[f"train/phase_{phase.replace('-', '')}_s"] = tally.phase_s[phase]
    for (fault, reason), count in tally.faults.items():
        metrics[f"train/faults/{fault}/{reason}"] = count
    if tally.rewards.count:
        metrics |= {
            "train/reward_mean": tally.rewards.mean,
            "train/reward_std": tally.rewards.deviation,
            "train/reward_max": tally.rewards.largest,
            "train/reward_min": tally.rewards.smallest,
            "train/turns_mean": tally.turns.mean,
            "train/finished_naturally": tally.finished_count / rollout_count,
        }
    return metrics

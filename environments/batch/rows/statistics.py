"""The statistics of a run, summed up from its rows, so that a resumed run has those of an undisturbed one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from environments.batch.rows.trajectory_row import COUNTED_TOOLS


class RunStatistics:
    """Sums over the trajectories of a run, and over what else happened in this session of it."""

    def __init__(self) -> None:
        self.completed_count = 0
        #: The prompts that failed in this session. A resumed run begins them again.
        self.failed_count = 0
        self._ends: Counter[str] = Counter()
        self._toolsets: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._tools: dict[str, Counter[str]] = {tool: Counter() for tool in COUNTED_TOOLS}
        self._sums: Counter[str] = Counter()
        self._times_s = {"duration_s": 0.0, "model_time_s": 0.0, "tool_time_s": 0.0}
        self._failures: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()

    def add_row(self, row: Mapping[str, Any]) -> None:
        """Count a row of `trajectories.jsonl`."""
        metadata = row["metadata"]
        self._ends[row["end"]] += 1
        self._toolsets.update(row["toolsets"])
        self._calls.update(row["tool_calls"])
        for tool, counts in row["tool_stats"].items():
            self._tools[tool].update(counts)
        self._sums.update({"turns": row["turns"], "repeated_attempts": metadata["attempts"] - 1})
        for name in self._times_s:
            self._times_s[name] += metadata[name]
        self.completed_count += 1

    def add_failure(self, reason: str) -> None:
        """Count a prompt that has no trajectory, by the reason."""
        self.failed_count += 1
        self._failures[reason] += 1

    def add_fault(self, reason: str) -> None:
        """Count an attempt that met a fault of the infrastructure, by the reason."""
        self._faults[reason] += 1

    def document(self) -> dict[str, Any]:
        """Return the sums as JSON values."""
        finished = max(self.completed_count, 1)
        return {
            "completed": self.completed_count,
            "failed": self.failed_count,
            "ends": dict(sorted(self._ends.items())),
            "turns": self._sums["turns"],
            "turns_per_trajectory": round(self._sums["turns"] / finished, 3),
            "toolsets": dict(sorted(self._toolsets.items())),
            "tool_calls": dict(self._calls),
            "tools": {tool: _tool_document(counts) for tool, counts in self._tools.items()},
            "repeated_attempts": self._sums["repeated_attempts"],
            "times": {name: round(time_s, 3) for name, time_s in self._times_s.items()},
            "failures_of_this_session": dict(sorted(self._failures.items())),
            "infra_faults_of_this_session": dict(sorted(self._faults.items())),
        }


def _tool_document(counts: Mapping[str, int]) -> dict[str, float]:
    count, success = counts.get("count", 0), counts.get("success", 0)
    return {"count": count, "success": success, "failure": counts.get("failure", 0), "success_rate": round(success / count, 4) if count else 0.0}

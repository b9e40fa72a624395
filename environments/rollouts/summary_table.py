"""The table that a process prints at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from environments.rollouts.statistics import Tally
from environments.rollouts.trajectory import PHASES

if TYPE_CHECKING:
    from rich.console import RenderableType

#: How many unusable rows are named; the others are counted.
_MAX_NAMED_ROWS = 10


def render_summary(tally: Tally, duration_s: float) -> RenderableType:
    """Return the table of a run, for `rich`.

    Args:
        tally: what the rollouts came to.
        duration_s: how long the run took, in seconds.
    """
    from rich.table import Table  # heavy, and only needed at the end
    from rich.text import Text

    table = Table(title="Rollouts", title_justify="left", show_header=False)
    table.add_column(justify="left", no_wrap=True)
    table.add_column(justify="left", overflow="fold")
    for index, rows in enumerate(_sections(tally, duration_s)):
        if index:
            table.add_section()
        for name, value in rows:
            table.add_row(name, Text(value))
    return table


def print_summary(tally: Tally, duration_s: float, metrics: Mapping[str, float] | None = None, note: str = "") -> None:
    """Print the table of a run, the metrics of an evaluation before it, and a note after it.

    Args:
        tally: what the rollouts came to.
        duration_s: how long the run took, in seconds.
        metrics: the metrics of an evaluation, by name.
        note: a part of a sentence; empty for none.
    """
    from rich.console import Console  # heavy, and only needed at the end

    console = Console(soft_wrap=False)
    for name, value in (metrics or {}).items():
        console.print(f"{name}: {value:.4g}")
    console.print(render_summary(tally, duration_s))
    if note:
        console.print(f"{note[0].upper()}{note[1:]}.", soft_wrap=True, markup=False, highlight=False)


def _sections(tally: Tally, duration_s: float) -> list[list[tuple[str, str]]]:
    sections = [_outcomes(tally, duration_s), _tools(tally), _times(tally), _faults(tally)]
    return [rows for rows in sections if rows]


def _outcomes(tally: Tally, duration_s: float) -> list[tuple[str, str]]:
    rewards = tally.rewards
    rows = [
        ("groups", f"{tally.group_count} complete, {tally.lost_group_count} lost, in {duration_s:.1f} s"),
        ("rollouts", f"{rewards.count} scored, {tally.repeated_count} repeated, {tally.dropped_count} dropped, {tally.cancelled_count} cancelled"),
    ]
    if rewards.count:
        rows.append(("reward", f"mean {rewards.mean:.3f}, deviation {rewards.deviation:.3f}, from {rewards.smallest:.3f} to {rewards.largest:.3f}"))
        ends = ", ".join(f"{end} {count}" for end, count in tally.ends.most_common())
        rows.append(("turns", f"mean {tally.turns.mean:.1f}; ended by: {ends}"))
    if tally.cut_count:
        rows.append(("cut", f"{tally.cut_count} rollouts were longer than max_token_length"))
    return rows


def _tools(tally: Tally) -> list[tuple[str, str]]:
    calls = tally.tool_calls
    rows = [
        (
            "tool calls",
            f"{calls['attempted']} attempted, {calls['schema_valid']} schema-valid, {calls['executed_ok']} executed, {calls['exec_error']} with an error",
        )
    ]
    if tally.tool_errors:
        rows.append(("tool errors", ", ".join(f"{tool} {count}" for tool, count in tally.tool_errors.most_common())))
    if tally.tool_faults:
        rows.append(("faults of calls", _counts(tally.tool_faults.most_common())))
    return rows


def _times(tally: Tally) -> list[tuple[str, str]]:
    return [
        ("time by phase", ", ".join(f"{phase} {tally.phase_s[phase]:.1f} s" for phase in PHASES)),
        ("time for sandboxes", f"{tally.sandbox_s:.1f} s; lost with repeated or dropped rollouts: {tally.lost_s:.1f} s"),
    ]


def _faults(tally: Tally) -> list[tuple[str, str]]:
    rows = []
    if tally.faults:
        rows.append(("faults (not scored)", _counts(tally.faults.most_common())))
    if tally.ambiguous_scored_count:
        rows.append(("ambiguous, scored", str(tally.ambiguous_scored_count)))
    named = list(tally.unusable_rows.items())
    rows += [("unusable row", f"{row}: {reason}") for row, reason in named[:_MAX_NAMED_ROWS]]
    if len(named) > _MAX_NAMED_ROWS:
        rows.append(("unusable rows", f"{len(named) - _MAX_NAMED_ROWS} more"))
    return rows


def _counts(counts: list[tuple[tuple[str, str], int]]) -> str:
    return ", ".join(f"{fault}/{reason} {count}" for (fault, reason), count in counts)

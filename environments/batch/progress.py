"""What a run shows: its progress while it goes on, and a table of its statistics at the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from environments.batch.files.prompt_file import DatasetScan, Prompt
from environments.batch.rows.statistics import RunStatistics
from environments.toolsets import list_distributions

#: How often the progress is shown where there is no terminal, in seconds.
LINE_INTERVAL_S = 10.0
#: How many failed prompts are shown. All of them are in `errors.jsonl`.
MAX_SHOWN_FAILURES = 20
#: The width of output that does not go to a terminal: nothing is wrapped.
_UNLIMITED_WIDTH = 10_000


def make_console(*, stderr: bool) -> Console:
    """Create the console for a stream. Without a terminal, its lines are as long as they need to be."""
    console = Console(stderr=stderr, highlight=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _UNLIMITED_WIDTH
    return console


class ProgressDisplay:
    """Shows the progress of a run on standard error: a bar on a terminal, else a line from time to time.

    Args:
        console: the console.
        prompt_count: how many prompts the run has.
        done_count: how many of them have a trajectory already.
        worker_count: how many slots the run uses at most.
    """

    def __init__(self, console: Console, prompt_count: int, done_count: int, worker_count: int) -> None:
        self._prompt_count = prompt_count
        self._worker_count = worker_count
        #: Where the lines go.
        self.console = console
        self._first_count = done_count
        #: When the workers began. The start of the service is no part of the rate.
        self._began_s: float | None = None
        self._last_line_s = time.monotonic()
        self._is_ended = False
        self._shown_failures = 0
        self._bar = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            TextColumn("errors {task.fields[errors]}"),
            TextColumn("slots {task.fields[slots]}"),
            console=console,
            refresh_per_second=4,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("prompts", total=prompt_count, completed=done_count, rate="", errors=0, slots=f"0/{worker_count}")

    def update(self, statistics: RunStatistics, held_count: int) -> None:
        """Show the present state."""
        done_count = statistics.completed_count + statistics.failed_count
        now_s = time.monotonic()
        self._began_s = self._began_s or now_s
        rate = (done_count - self._first_count) / (now_s - self._began_s) if now_s > self._began_s else 0.0
        rate_text, slots = f"{rate:.2f}/s", f"{held_count}/{self._worker_count}"
        self._bar.update(self._task, completed=done_count, rate=rate_text, errors=statistics.failed_count, slots=slots)
        is_last = done_count >= self._prompt_count > self._first_count and not self._is_ended
        self._is_ended = self._is_ended or is_last
        if not self.console.is_terminal and (is_last or now_s - self._last_line_s >= LINE_INTERVAL_S):
            self._last_line_s = now_s
            remaining = f"ETA {(self._prompt_count - done_count) / rate:.0f} s" if rate else "ETA unknown"
            counts = f"{done_count}/{self._prompt_count} prompts, {rate_text}, {f'after {now_s - self._began_s:.1f} s' if is_last else remaining}"
            self.console.print(f"{counts}, errors {statistics.failed_count}, slots {slots}", markup=False)

    def report_failure(self, prompt: Prompt, sentence: str) -> None:
        """Show that a prompt has no trajectory."""
        self._shown_failures += 1
        if self._shown_failures <= MAX_SHOWN_FAILURES:
            self.console.print(f"line {prompt.line}: {sentence}", markup=False)
        elif self._shown_failures == MAX_SHOWN_FAILURES + 1:
            self.console.print("further failures are only in errors.jsonl", markup=False)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._bar.stop()


def print_scan(console: Console, dataset: str, scan: DatasetScan, *, skipped: bool) -> None:
    """Name the lines of a dataset that cannot be used."""
    for broken in scan.broken_lines:
        console.print(f"{dataset}: {broken}{'; the line is skipped' if skipped else ''}", markup=False)
    unnamed_count = scan.broken_count - len(scan.broken_lines)
    if unnamed_count:
        console.print(f"{dataset}: {unnamed_count} further lines cannot be used", markup=False)


def print_statistics(console: Console, document: Mapping[str, Any]) -> None:
    """Print the table at the end of a run.

    Args:
        console: the console.
        document: the content of `statistics.json`.
    """
    session, calls = document["session"], document["tool_calls"]
    table = Table(title=f"Run {escape(str(document['run_name']))}", title_justify="left", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    rows: list[tuple[str, object]] = [
        ("prompts", document["prompts"]),
        ("completed", document["completed"]),
        ("failed", document["failed"]),
        ("broken lines", document["broken_lines"]),
        ("merged lines", document["merged_lines"]),
        ("turns per trajectory", f"{document['turns_per_trajectory']:.2f}"),
        ("tool calls", calls.get("attempted", 0)),
        ("tool calls that failed", calls.get("exec_error", 0)),
        ("repeated attempts", document["repeated_attempts"]),
        ("prompts per second", f"{session['prompts_per_s']:.2f}"),
        ("slot use", f"{100 * session['slot_use']:.0f} %"),
    ]
    rows += [(f"ended: {end}", count) for end, count in document["ends"].items()]
    rows += [(f"failed: {reason}", count) for reason, count in document["failures_of_this_session"].items()]
    rows += [(f"fault: {reason}", count) for reason, count in document["infra_faults_of_this_session"].items()]
    for name, value in rows:
        table.add_row(escape(name), str(value))
    console.print(table)
    tools = Table("tool", title="Tools", title_justify="left")
    for heading in ("calls", "successes", "failures", "success rate"):
        tools.add_column(heading, justify="right")
    for tool, counts in document["tools"].items():
        if counts["count"]:
            tools.add_row(escape(tool), str(counts["count"]), str(counts["success"]), str(counts["failure"]), f"{100 * counts['success_rate']:.0f} %")
    if tools.row_count:
        console.print(tools)


def print_distributions(console: Console) -> None:
    """Print the distributions from which the tool sets of a prompt can be sampled."""
    table = Table("distribution", "tool sets", "description")
    for distribution in list_distributions():
        sets = ", ".join(f"{name} {100 * probability:.0f} %" for name, probability in distribution.probabilities.items())
        table.add_row(distribution.name, sets, escape(distribution.description))
    console.print(table)

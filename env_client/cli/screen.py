"""What goes to the terminal: tables and notes for people, one JSON document for programs."""

from __future__ import annotations

import dataclasses
import json
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from env_client.cli.failures import Failure

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

#: Where nobody looks at a terminal, nothing is cut or wrapped.
_ENDLESS = 100_000


class Screen:
    """Standard output for what was asked, standard error for notes.

    Args:
        as_json: print one JSON document and no notes.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out = _console(stderr=False)
        self._err = _console(stderr=True)

    def document(self, value: Any) -> None:
        """Print the one JSON document."""
        sys.stdout.write(json.dumps(plain(value), ensure_ascii=False, indent=2 if self._out.is_terminal else None) + "\n")
        sys.stdout.flush()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str) -> None:
        """Print rows under their heads.

        Args:
            columns: the heads; one that ends in `>` is of numbers.
            rows: as many cells each; a column without any content is left out.
            empty: what to say on standard error where there are none.
        """
        shown = [[printable(cell) for cell in row] for row in rows]
        if not shown:
            self.note(empty)
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        used = [number for number in range(len(columns)) if any(row[number] for row in shown)]
        for number in used:
            head = columns[number]
            # The first names the thing, and is copied from here: it stays in one piece.
            table.add_column(
                head.rstrip(">"), justify="right" if head.endswith(">") else "left", overflow="fold", no_wrap=number == 0, min_width=len(head.rstrip(">"))
            )
        for row in shown:
            table.add_row(*(Text(row[number]) for number in used))
        with self._out.capture() as captured:
            self._out.print(table)
        self.line("\n".join(line.rstrip() for line in captured.get().splitlines()))

    def line(self, text: str) -> None:
        """Print a line as it is."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def styled(self, *parts: tuple[str, str]) -> None:
        """Print a line of (text, style) parts."""
        self._out.print(Text.assemble(*((printable(text), style) for text, style in parts)))

    def wrapped(self, text: str, indent: int) -> list[str]:
        """A text in lines that fit the terminal beside an indent; as one line where there is none."""
        return _lines(printable(text), self._out.width - indent, "")

    def note(self, text: str) -> None:
        """Say something by the way, on standard error; nothing in `--json`."""
        if not self.as_json:
            self._err.print(Text("\n".join(_lines(printable(text), self._err.width, "")), style="dim"))

    def failure(self, failure: Failure) -> None:
        """Say on standard error what does not work, and what to do."""
        first, *more = _lines("sandbox: " + printable(failure.sentence, "\n"), self._err.width, "  ")
        if failure.next_step:
            more += ["  " + line for line in _lines(printable(failure.next_step), self._err.width - 2, "")]
        told = Text(first)
        told.stylize("bold red", 0, len("sandbox:"))
        self._err.print(Text("\n").join((told, *map(Text, more))))


def _lines(text: str, width: int, indent: str) -> list[str]:
    """A text in lines of whole words; what has lines of its own keeps them."""
    lines = text.splitlines()
    return [piece for line in lines for piece in textwrap.wrap(line, max(20, width), subsequent_indent=indent, break_on_hyphens=False) or [""]] or [""]


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _ENDLESS
    return console


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [plain(child) for child in value]
    return value


def printable(text: str, also: str = "") -> str:
    """A text that moves no cursor: what a slot named its files is not for the terminal to obey."""
    return "".join(char if char.isprintable() or char in also else char.encode("unicode_escape").decode() for char in text)


def clock_time(at: float) -> str:
    """A point in time as the local clock shows it; the day too, where it is not today."""
    local = time.localtime(at)
    return time.strftime("%H:%M:%S" if local[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", local)


def span(seconds: float) -> str:
    """A duration for people: 45 s, 5 min, 2.0 h."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def size(count: int) -> str:
    """A number of bytes for people."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")

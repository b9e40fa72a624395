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
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from env_client.cli.failures import Failure

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")]

#: Where nobody looks at a terminal, nothing is cut or wrapped.
_ENDLESS = 100_000
_GAP = "  "
#: Prose in a column narrower than this is hard to read.
_PROSE_WIDTH = 24


class Printer:
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
        escaped = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        sys.stdout.write(json.dumps(plain(value), ensure_ascii=escaped, indent=2 if self._out.is_terminal else None) + "\n")
        sys.stdout.flush()

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str, wraps: bool = True) -> None:
        """Print rows under their heads; where the terminal is too narrow for that, each row as a list.

        Args:
            columns: the heads; one that ends in `>` is of numbers.
            rows: as many cells each; a column without any content is left out.
            empty: what to say on standard error where there are none.
            wraps: whether the last column is prose, of which a long one goes on in the next line.
        """
        shown = [[printable(cell) for cell in row] for row in rows]
        if not shown:
            self.note(empty)
            return
        used = [number for number in range(len(columns)) if any(row[number] for row in shown)]
        heads = [columns[number].rstrip(">") for number in used]
        cells = [[row[number] for number in used] for row in shown]
        widths = [max(map(cell_len, column)) for column in zip(heads, *cells, strict=True)]
        room = self._out.width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1)
        if room < (min(widths[-1], _PROSE_WIDTH) if wraps else 0):
            self._lists(heads, cells)
            return
        places = [(width, columns[number].endswith(">")) for width, number in zip(widths, used, strict=True)]
        self.styled((_row(heads, places), "bold"))
        for row in cells:
            first, *more = _lines(row[-1], room, "") if wraps else [row[-1]]
            self.styled((_row([*row[:-1], first], places), ""))
            for line in more:
                self.styled((" " * (self._out.width - room) + line, ""))

    def _lists(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        indent = max(map(cell_len, heads)) + len(_GAP)
        for number, row in enumerate(rows):
            if number:
                self.line("")
            for head, cell in zip(heads, row, strict=True):
                if cell:
                    self.entry(head, cell, indent, "bold")

    def line(self, text: str) -> None:
        """Print a line as it is."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def styled(self, *parts: tuple[str, str]) -> None:
        """Print a line of (text, style) parts."""
        self._out.print(Text.assemble(*((printable(text), style) for text, style in parts)))

    def entry(self, name: str, text: str, indent: int, style: str = "") -> None:
        """Print a name, and beside it a text in lines that fit the terminal."""
        first, *more = self.wrapped(text, indent)
        self.styled((name.ljust(indent), style), (first, ""))
        for line in more:
            self.styled((" " * indent + line, ""))

    def wrapped(self, text: str, indent: int) -> list[str]:
        """A text in lines that fit the terminal beside an indent; as one line where there is none."""
        return _lines(printable(text), self._out.width - indent, "")

    def note(self, text: str) -> None:
        """Say something by the way, on standard error; nothing in `--json`, nor where there is nothing to say."""
        if text and not self.as_json:
            self._err.print(Text("\n".join(_lines(printable(text), self._err.width, "")), style="dim"))

    def failure(self, failure: Failure) -> None:
        """Say on standard error what does not work, and what to do."""
        first, *more = _lines("sandbox: " + printable(failure.sentence, "\n").replace("\n", "\n  "), self._err.width, "  ")
        if failure.next_step:
            more += ["  " + line for line in _lines(printable(failure.next_step), self._err.width - 2, "")]
        told = Text(first)
        told.stylize("bold red", 0, len("sandbox:"))
        self._err.print(Text("\n").join((told, *map(Text, more))))


def _row(cells: Sequence[str], places: Sequence[tuple[int, bool]]) -> str:
    """A line of a table; a place is its width, and whether it is of numbers."""
    padded = [
        " " * (width - cell_len(cell)) + cell if right else cell + " " * (width - cell_len(cell)) for cell, (width, right) in zip(cells, places, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def _lines(text: str, width: int, indent: str) -> list[str]:
    """A text in lines of whole words, also where one is longer than a line; what has lines of its own keeps them."""
    wrapper = textwrap.TextWrapper(max(20, width), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return [piece for line in text.splitlines() for piece in wrapper.wrap(line) or [""]] or [""]


class _Console(Console):
    """A console that leaves a reader who has gone to the caller."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
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

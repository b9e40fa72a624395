"""Printing: tables and notes for people, one JSON document for programs."""

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

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]

#: The width of output that does not go to a terminal: nothing is wrapped.
_UNLIMITED_WIDTH = 100_000
_GAP = "  "
#: The least width of a column with wrapped prose.
_MIN_PROSE_WIDTH = 24


class Printer:
    """Prints results to standard output, and notes and failures to standard error.

    Args:
        as_json: print one JSON document and no notes.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out = _console(stderr=False)
        self._err = _console(stderr=True)

    def print_json(self, value: Any) -> None:
        """Print the JSON document."""
        escaped = (sys.stdout.encoding or "").lower().replace("-", "") != "utf8"
        sys.stdout.write(json.dumps(to_json_value(value), ensure_ascii=escaped, indent=2 if self._out.is_terminal else None) + "\n")
        sys.stdout.flush()

    def print_table(self, columns: Sequence[str], rows: Iterable[Sequence[str]], *, empty: str, wraps: bool = True) -> None:
        """Print rows under their headings, or each row as a list if the terminal is too narrow for a table.

        Args:
            columns: the headings; one that ends in `>` is for a right-aligned column of numbers.
            rows: the cells of each row. A column without any content is left out.
            empty: the note for standard error if there are no rows.
            wraps: whether the last column is prose, which is wrapped if it is long.
        """
        escaped_rows = [[escape_control_characters(cell) for cell in row] for row in rows]
        if not escaped_rows:
            self.print_note(empty)
            return
        used = [number for number in range(len(columns)) if any(row[number] for row in escaped_rows)]
        heads = [columns[number].rstrip(">") for number in used]
        cells = [[row[number] for number in used] for row in escaped_rows]
        widths = [max(map(cell_len, column)) for column in zip(heads, *cells, strict=True)]
        room = self._out.width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1)
        if room < (min(widths[-1], _MIN_PROSE_WIDTH) if wraps else 0):
            self._print_rows_as_lists(heads, cells)
            return
        places = [(width, columns[number].endswith(">")) for width, number in zip(widths, used, strict=True)]
        self.print_styled((_format_row(heads, places), "bold"))
        for row in cells:
            first, *more = _wrap_lines(row[-1], room, "") if wraps else [row[-1]]
            self.print_styled((_format_row([*row[:-1], first], places), ""))
            for line in more:
                self.print_styled((" " * (self._out.width - room) + line, ""))

    def _print_rows_as_lists(self, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        indent = max(map(cell_len, heads)) + len(_GAP)
        for number, row in enumerate(rows):
            if number:
                self.print_line("")
            for head, cell in zip(heads, row, strict=True):
                if cell:
                    self.print_entry(head, cell, indent, "bold")

    def print_line(self, text: str) -> None:
        """Print a line unchanged."""
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def print_styled(self, *parts: tuple[str, str]) -> None:
        """Print a line that consists of (text, style) pairs."""
        self._out.print(Text.assemble(*((escape_control_characters(text), style) for text, style in parts)))

    def print_entry(self, name: str, text: str, indent: int, style: str = "") -> None:
        """Print a name with a text beside it, wrapped to the width of the terminal.

        Args:
            name: the name.
            text: the text.
            indent: the column in which the text begins.
            style: the rich style of the name.
        """
        first, *more = self.wrap_text(text, indent)
        self.print_styled((name.ljust(indent), style), (first, ""))
        for line in more:
            self.print_styled((" " * indent + line, ""))

    def wrap_text(self, text: str, indent: int) -> list[str]:
        """Wrap a text to the width of the terminal beside an indent; without a terminal, the text stays one line."""
        return _wrap_lines(escape_control_characters(text), self._out.width - indent, "")

    def print_note(self, text: str) -> None:
        """Print a note to standard error. An empty note is not printed, and with `--json` no note is."""
        if text and not self.as_json:
            self._err.print(Text("\n".join(_wrap_lines(escape_control_characters(text), self._err.width, "")), style="dim"))

    def print_failure(self, failure: Failure) -> None:
        """Print a failure and its next step to standard error."""
        first, *more = _wrap_lines("sandbox: " + escape_control_characters(failure.sentence, "\n").replace("\n", "\n  "), self._err.width, "  ")
        if failure.next_step:
            more += ["  " + line for line in _wrap_lines(escape_control_characters(failure.next_step), self._err.width - 2, "")]
        first_line = Text(first)
        first_line.stylize("bold red", 0, len("sandbox:"))
        self._err.print(Text("\n").join((first_line, *map(Text, more))))


def _format_row(cells: Sequence[str], places: Sequence[tuple[int, bool]]) -> str:
    """Format a row of a table. `places` has the width of each column, and whether it is right-aligned."""
    padded = [
        " " * (width - cell_len(cell)) + cell if right else cell + " " * (width - cell_len(cell)) for cell, (width, right) in zip(cells, places, strict=True)
    ]
    return _GAP.join(padded).rstrip()


def _wrap_lines(text: str, width: int, indent: str) -> list[str]:
    """Wrap a text at spaces; a word that is longer than a line is not broken. Line breaks in the text are kept."""
    wrapper = textwrap.TextWrapper(max(20, width), subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
    return [piece for line in text.splitlines() for piece in wrapper.wrap(line) or [""]] or [""]


class _Console(Console):
    """A rich console that raises `BrokenPipeError`, instead of ending the process, when the reader of the output has gone."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(*, stderr: bool) -> Console:
    console = _Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = _UNLIMITED_WIDTH
    return console


def to_json_value(value: Any) -> Any:
    """Convert a value, including the client's dataclasses, into one that `json` can encode."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {one.name: to_json_value(getattr(value, one.name)) for one in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): to_json_value(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [to_json_value(child) for child in value]
    return value


def escape_control_characters(text: str, allowed: str = "") -> str:
    """Escape all characters that are not printable. Names of files come from slots, and must not control the terminal.

    Args:
        text: the text.
        allowed: characters that are kept.
    """
    return "".join(char if char.isprintable() or char in allowed else char.encode("unicode_escape").decode() for char in text)


def format_time(at: float) -> str:
    """Format a time in the local time zone, with the date if it is not today.

    Args:
        at: the time in Unix seconds.
    """
    local = time.localtime(at)
    return time.strftime("%H:%M:%S" if local[:3] == time.localtime()[:3] else "%Y-%m-%d %H:%M", local)


def format_duration(seconds: float) -> str:
    """Format a duration for a person, as in 45 s, 5 min, 2.0 h."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def format_size(count: int) -> str:
    """Format a number of bytes for a person."""
    amount = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000 or unit == "GB":
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 100 else f"{amount:.1f} {unit}"
        amount /= 1000
    raise AssertionError("unreachable")

"""Tables in the README that a test run or a benchmark writes; each stands between two marker lines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.support.users import ROOT

README = ROOT / "README.md"


def _section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: begin[^\n]*-->\n)(.*?)(<!-- {name}: end -->)", re.DOTALL)


def render(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def parse(text: str) -> list[list[str]]:
    """Return the cells of a Markdown table, heading first, without the separator line."""
    lines = [line.strip().strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line] for line in lines if not all(set(cell.strip()) <= {"-", ":"} for cell in line)]


def read(name: str, path: Path = README) -> str:
    """Return the text between the markers of a section.

    Raises:
        LookupError: The file has no such section.
    """
    match = _section(name).search(path.read_text(encoding="utf-8"))
    if match is None:
        raise LookupError(f"{path.name} has no section '{name}'")
    return match.group(2)


def write(name: str, text: str, path: Path = README) -> None:
    """Replace the text between the markers of a section.

    Raises:
        LookupError: The file has no such section.
    """
    read(name, path)
    whole = path.read_text(encoding="utf-8")
    path.write_text(_section(name).sub(lambda match: f"{match.group(1)}{text}{match.group(3)}", whole), encoding="utf-8")

"""A pytest plugin that compares the isolation table from a run of the hostile suite with the table in the README."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.support import tables
from tests.support.users import ROOT

SECTION = "isolation"
FOUND = ROOT / "build" / "isolation.md"


class MatrixInReadme:
    """Writes the table after a successful run, or fails a run whose cells differ from the README. Cells that were not tested are not compared."""

    def __init__(self, *, write: bool) -> None:
        self.write = write
        self.stale: list[str] = []
        self._started_at = time.time()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not FOUND.exists() or FOUND.stat().st_mtime < self._started_at:
            return
        if self.write and session.exitstatus == pytest.ExitCode.OK:
            tables.write(SECTION, FOUND.read_text(encoding="utf-8"))
            return
        self.stale = list(differences(tables.read(SECTION), FOUND.read_text(encoding="utf-8")))
        if self.stale and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.stale:
            terminalreporter.section("the README's isolation table is not what this run found: make matrix writes it anew", red=True)
            for line in self.stale:
                terminalreporter.write_line(line)


def cells(table: str) -> dict[tuple[str, str], str]:
    """Return the cells of a Markdown table by row and column."""
    head, *rows = tables.parse(table) or [[]]
    return {(row[0], column): cell for row in rows for column, cell in zip(head[1:], row[1:], strict=True)}


def differences(written: str, found: str) -> Iterator[str]:
    """Describe the differences between the written table and the one from the run; empty if there are none."""
    said = cells(written)
    for (row, column), cell in cells(found).items():
        if cell != "–" and said.get((row, column)) != cell:
            yield f"{row}, {column}: found {cell}, the README says {said.get((row, column), 'nothing')}"

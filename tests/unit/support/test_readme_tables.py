"""The README's tables are compared and replaced as the runs that make them expect."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import tables
from tests.support.matrix_in_readme import differences

FOUND = tables.render(["tries to", "`bwrap` as root", "`uid` as root"], [["read", "held", "held"], ["see", "held", "**not held**"], ["leave", "–", "held"]])


def test_a_table_that_says_the_same_has_no_differences() -> None:
    assert list(differences(FOUND, FOUND)) == []


def test_cells_that_were_not_tried_are_not_compared() -> None:
    written = FOUND.replace("| leave | – | held |", "| leave | held | held |")

    assert list(differences(written, FOUND)) == []


def test_a_cell_told_otherwise_is_named() -> None:
    written = FOUND.replace("**not held**", "held")

    assert list(differences(written, FOUND)) == ["see, `uid` as root: found **not held**, the README says held"]


def test_a_row_that_is_missing_is_named() -> None:
    assert next(iter(differences("", FOUND))) == "read, `bwrap` as root: found held, the README says nothing"


def test_only_the_named_section_is_replaced(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("a\n<!-- one: begin (made) -->\nold\n<!-- one: end -->\n<!-- two: begin -->\nkept\n<!-- two: end -->\nz\n", encoding="utf-8")

    tables.write("one", "new \\1\n", file)

    assert file.read_text(encoding="utf-8") == "a\n<!-- one: begin (made) -->\nnew \\1\n<!-- one: end -->\n<!-- two: begin -->\nkept\n<!-- two: end -->\nz\n"
    assert tables.read("two", file) == "kept\n"


def test_a_section_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text("nothing\n", encoding="utf-8")

    with pytest.raises(LookupError, match="no section 'one'"):
        tables.write("one", "new", file)

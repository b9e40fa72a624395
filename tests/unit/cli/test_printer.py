"""Tests of printing tables, and lists where a table does not fit."""

from __future__ import annotations

import pytest

from env_client.cli.printer import Printer

HEADS = ("NAME", "COUNT>", "UNUSED", "STATE")
ROWS = [("first", "10", "", "ok"), ("second", "2", "", "the backend cannot be reached, and nobody knows why")]


def printed(capsys: pytest.CaptureFixture[str], width: int, *, wraps: bool = True) -> list[str]:
    printer = Printer()
    printer._out.width = width
    printer.print_table(HEADS, ROWS, empty="nothing", wraps=wraps)
    return capsys.readouterr().out.splitlines()


def test_a_table_that_fits_leaves_out_what_is_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, 100) == [
        "NAME    COUNT  STATE",
        "first      10  ok",
        "second      2  the backend cannot be reached, and nobody knows why",
    ]


def test_prose_in_the_last_column_goes_on_below(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, 45) == [
        "NAME    COUNT  STATE",
        "first      10  ok",
        "second      2  the backend cannot be reached,",
        "               and nobody knows why",
    ]


def test_what_does_not_fit_is_a_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, 30) == [
        "NAME   first",
        "COUNT  10",
        "STATE  ok",
        "",
        "NAME   second",
        "COUNT  2",
        "STATE  the backend cannot be",
        "       reached, and nobody",
        "       knows why",
    ]


def test_what_is_no_prose_is_left_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, 30, wraps=False)[2] == "second      2  the backend cannot be reached, and nobody knows why"


def test_wide_characters_are_as_wide_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    Printer().print_table(("A", "B"), [("日本", "x"), ("abcd", "y")], empty="")

    assert capsys.readouterr().out.splitlines() == ["A     B", "日本  x", "abcd  y"]


@pytest.mark.parametrize("text", ["", "said"])
def test_an_empty_note_is_not_printed(capsys: pytest.CaptureFixture[str], text: str) -> None:
    Printer().print_note(text)
    Printer(as_json=True).print_note("never")

    assert capsys.readouterr().err == (f"{text}\n" if text else "")


def test_a_fact_goes_on_below_and_no_word_of_it_is_broken(capsys: pytest.CaptureFixture[str]) -> None:
    printer = Printer()
    printer._out.width = 30
    printer.print_entry("state", "draining: see /a/path/that/is/longer/than/the/line for why", 7)

    assert capsys.readouterr().out.splitlines() == ["state  draining: see", "       /a/path/that/is/longer/than/the/line", "       for why"]

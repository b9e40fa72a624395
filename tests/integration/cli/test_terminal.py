"""Tests of colours: they are used on a terminal only."""

from __future__ import annotations

import pytest

from tests.integration.cli.sandbox_command import SandboxCommand

COMMANDS = [["pools"], ["--help"], ["doctor"], ["pools", "nope"]]


@pytest.mark.parametrize("words", [["pools"], ["doctor"], ["pools", "nope"]], ids=" ".join)
def test_a_terminal_has_colours(sandbox: SandboxCommand, words: list[str]) -> None:
    with sandbox.on_terminal(*words) as terminal:
        terminal.end()

    assert b"\x1b[" in terminal.shown


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_whoever_wants_none_gets_none(sandbox: SandboxCommand, words: list[str]) -> None:
    with sandbox.on_terminal(*words, environ={"NO_COLOR": "1"}) as terminal:
        terminal.end()

    assert b"\x1b[3" not in terminal.shown


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_file_gets_none(sandbox: SandboxCommand, words: list[str]) -> None:
    done = sandbox(*words)

    assert b"\x1b" not in done.stdout + done.stderr


def test_a_narrow_terminal_breaks_lines_between_words(sandbox: SandboxCommand) -> None:
    with sandbox.on_terminal("pools", "nope", environ={"COLUMNS": "40"}) as terminal:
        terminal.end()

    assert all(len(line) <= 40 for line in terminal.text.splitlines())
    assert "sandbox: there is no pool 'nope'; there" in terminal.text


def test_ids_stay_in_one_piece(sandbox: SandboxCommand, lease: str) -> None:
    with sandbox.on_terminal("leases", environ={"COLUMNS": "60"}) as terminal:
        terminal.end()

    assert lease in terminal.text


def test_no_arguments_is_help(sandbox: SandboxCommand) -> None:
    done = sandbox()

    assert done.stdout.startswith(b"Usage: sandbox ")
    assert sandbox("pool").stdout.startswith(b"Usage: sandbox pool ")

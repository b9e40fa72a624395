"""Tests of quoting: a program gets its arguments unchanged through bash."""

from __future__ import annotations

import os
import subprocess

import pytest

from env_client.cli.command_line import CommandLine
from env_client.cli.failures import Failure


@pytest.mark.parametrize(
    "words",
    [["printf", "%s|", "a b", "$HOME", "*", "'", "\n", ""], ["printf", "%s", os.fsdecode(b"\xff'\x01\\")], ["time", "true"]],
    ids=["signs", "bytes", "time"],
)
def test_a_program_gets_its_words_as_they_are(words: list[str]) -> None:
    expected = subprocess.run(words, capture_output=True, check=True).stdout if words[0] != "time" else b""

    done = subprocess.run(["bash", "-c", CommandLine(words, None, []).text], capture_output=True, check=False)

    assert (done.returncode, done.stdout) == (0, expected)


@pytest.mark.parametrize("word", ["if", "A=1", "A+=1", "{", "!", "[[", "~", "function"])
def test_no_first_word_means_anything_to_bash(word: str) -> None:
    done = subprocess.run(["bash", "-c", CommandLine([word, "true"], None, []).text], capture_output=True, check=False)

    assert done.returncode == 127


@pytest.mark.parametrize(("words", "is_line"), [(["echo hi"], True), (["ls|wc"], True), (["nope"], False), (["echo hi", "there"], False)])
def test_a_shell_line_as_one_word_gets_a_hint(words: list[str], is_line: bool) -> None:
    command = CommandLine(words, None, [])

    assert command.hint(127).endswith(f"-- bash -c '{words[0]}'") is is_line
    assert command.hint(0) == command.hint(1) == command.hint(None) == ""


@pytest.mark.parametrize(
    ("words", "ended", "is_told"),
    [
        (["python3"], (0, 0), True),
        (["/bin/bash"], (0, 0), True),
        (["python3"], (0, 1), False),
        (["python3"], (1, 0), False),
        (["true"], (0, 0), False),
        (["python3", "x.py"], (0, 0), False),
    ],
)
def test_a_program_that_reads_its_input_gets_a_hint_on_a_terminal(words: list[str], ended: tuple[int, int], is_told: bool) -> None:
    command = CommandLine(words, None, [])

    assert ("a terminal is not read" in command.hint(*ended, on_terminal=True)) is is_told
    assert command.hint(*ended) == ""


@pytest.mark.parametrize(("cwd", "env"), [(os.fsdecode(b"\xff"), []), (None, [os.fsdecode(b"A=\xff")])])
def test_what_is_no_text_is_named_and_not_shown(cwd: str | None, env: list[str]) -> None:
    with pytest.raises(Failure, match=r"--(cwd|env A) is not text in UTF-8$"):
        CommandLine(["true"], cwd, env)

"""The command of `sandbox run` and `sandbox exec`, as the tool `bash` accepts it."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Sequence
from typing import Any

from env_client.cli.arguments import check_text, escape_invalid_bytes
from env_client.cli.exit_codes import NOT_FOUND
from env_client.cli.failures import Failure

#: First words that bash treats as syntax unless they are quoted. `time` is not among them: as a keyword it does what the program `time` does.
_BASH_SYNTAX = re.compile(r"(if|then|elif|else|fi|case|esac|for|select|while|until|do|done|in|function|coproc)|\w+\+?=.*", re.DOTALL)
_SHELL_CHARACTERS = re.compile(r"[\s|&;<>()$`*?]")
#: Programs that read standard input if they get no arguments.
_READS_STDIN = re.compile(r"(|ba|da|z|k)sh|i?python[\d.]*|node|perl|ruby|irb|cat|sqlite3|bc")


class CommandLine:
    """A command for the tool `bash`.

    Args:
        words: the program and its arguments. They are quoted, so that bash passes them on unchanged.
        cwd: the working folder.
        env: variables as `NAME=VALUE`, or as `NAME` for a local variable.

    Raises:
        Failure: there is no command, or a variable has the wrong form.
    """

    def __init__(self, words: Sequence[str], cwd: str | None, env: Sequence[str]) -> None:
        words = words[1:] if words[:1] == ["--"] else words
        if not words:
            raise Failure("there is no command to run", "give one after `--`: … -- ls -la")
        if words[0].startswith("-"):
            raise Failure(f"{words[0]!r} stands where the command should be", "write the options first, and the command after `--`: … -- ls -la")
        first = f"'{words[0]}'" if _BASH_SYNTAX.fullmatch(words[0]) and shlex.quote(words[0]) == words[0] else _quote(words[0])
        self.text = " ".join((first, *map(_quote, words[1:])))
        self._single_word = words[0] if len(words) == 1 else ""
        self.cwd = cwd
        self.env = dict(_parse_variable(variable) for variable in env)
        check_text("--cwd", cwd or "")
        for name, value in self.env.items():
            check_text(f"--env {escape_invalid_bytes(name)}", name + value)

    def tool_args(self, stdin: str | None, input_path: str | None) -> dict[str, Any]:
        """Return the arguments of the tool `bash`.

        Args:
            stdin: the standard input, or None.
            input_path: a file of the slot with the standard input, or None. The command deletes the file when it has opened it.
        """
        quoted = shlex.quote(input_path or "")
        text = self.text if input_path is None else f"exec <{quoted} && rm -f {quoted} && {self.text}"
        args: dict[str, Any] = {"command": text, "cwd": self.cwd, "env": self.env or None, "stdin": stdin}
        return {name: value for name, value in args.items() if value is not None}

    def hint(self, exit_code: int | None, output_bytes: int = 0, *, on_terminal: bool = False) -> str:
        """Return advice on a frequent mistake, or an empty string.

        The mistakes are a whole shell line in one argument, and a program that reads standard input when there is none.

        Args:
            exit_code: the exit code of the command.
            output_bytes: how much the command wrote.
            on_terminal: whether the local standard input is a terminal, which is not read.
        """
        if on_terminal and (exit_code, output_bytes) == (0, 0) and _READS_STDIN.fullmatch(posixpath.basename(self._single_word)):
            return f"{self._single_word} had no input: a terminal is not read; pipe it in, or give the command as words: -- {self._single_word} …"
        if exit_code != NOT_FOUND or not _SHELL_CHARACTERS.search(self._single_word):
            return ""
        return f"the words after `--` are a program and its arguments; for a shell line write: -- bash -c {shlex.quote(self._single_word)}"


def _quote(word: str) -> str:
    """Quote an argument for bash. One that is not valid UTF-8 is written byte by byte."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + "'"
    return shlex.quote(word)


def _parse_variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or (not equals and name not in os.environ):
        raise Failure(f"--env takes NAME=VALUE, not {text!r}", "or NAME alone, for a variable that is set here")
    return name, value if equals else os.environ[name]

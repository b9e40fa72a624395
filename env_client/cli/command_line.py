"""The words of a command as the tool `bash` takes them."""

from __future__ import annotations

import os
import posixpath
import re
import shlex
from collections.abc import Sequence
from typing import Any

from env_client.cli.arguments import check_text, shown_bytes
from env_client.cli.failures import Failure

#: First words that bash would not take for a program's name, quoted or not; `time` does to a program what it is there for.
_OF_BASH = re.compile(r"(if|then|elif|else|fi|case|esac|for|select|while|until|do|done|in|function|coproc)|\w+\+?=.*", re.DOTALL)
_OF_A_SHELL = re.compile(r"[\s|&;<>()$`*?]")
#: What reads standard input if it is given no words.
_READS_INPUT = re.compile(r"(|ba|da|z|k)sh|i?python[\d.]*|node|perl|ruby|irb|cat|sqlite3|bc")
NOT_FOUND = 127


class CommandLine:
    """A command as the tool `bash` takes it.

    Args:
        words: the program and its arguments; nothing in them means anything to a shell.
        cwd: where it runs.
        env: `NAME=VALUE` pairs.

    Raises:
        Failure: there is no command, or a pair is none.
    """

    def __init__(self, words: Sequence[str], cwd: str | None, env: Sequence[str]) -> None:
        words = words[1:] if words[:1] == ["--"] else words
        if not words:
            raise Failure("there is no command to run", "give one after `--`: … -- ls -la")
        if words[0].startswith("-"):
            raise Failure(f"{words[0]!r} stands where the command should be", "options go first, and the command after `--`: … -- ls -la")
        first = f"'{words[0]}'" if _OF_BASH.fullmatch(words[0]) and shlex.quote(words[0]) == words[0] else _quote(words[0])
        self.text = " ".join((first, *map(_quote, words[1:])))
        self._only = words[0] if len(words) == 1 else ""
        self.cwd = cwd
        self.env = dict(_pair(one) for one in env)
        check_text("--cwd", cwd or "")
        for name, value in self.env.items():
            check_text(f"--env {shown_bytes(name)}", name + value)

    def args(self, stdin: str | None, input_path: str | None) -> dict[str, Any]:
        """The arguments of the tool."""
        quoted = shlex.quote(input_path or "")
        text = self.text if input_path is None else f"exec <{quoted} && rm -f {quoted} && {self.text}"
        given: dict[str, Any] = {"command": text, "cwd": self.cwd, "env": self.env or None, "stdin": stdin}
        return {name: value for name, value in given.items() if value is not None}

    def hint(self, exit_code: int | None, output_bytes: int = 0, *, on_terminal: bool = False) -> str:
        """What to try instead, where a whole shell line was given as the one word of a program's name, or a program would read what it does not get.

        Args:
            exit_code: of the command.
            output_bytes: how much it wrote.
            on_terminal: whether standard input here is a terminal, which is not read.
        """
        if on_terminal and (exit_code, output_bytes) == (0, 0) and _READS_INPUT.fullmatch(posixpath.basename(self._only)):
            return f"{self._only} had no input: a terminal is not read; pipe it in, or give the command as words: -- {self._only} …"
        if exit_code != NOT_FOUND or not _OF_A_SHELL.search(self._only):
            return ""
        return f"the words after `--` are a program and its arguments; for a shell line say: -- bash -c {shlex.quote(self._only)}"


def _quote(word: str) -> str:
    """A word for bash; what is no text in UTF-8, byte by byte."""
    try:
        word.encode()
    except UnicodeEncodeError:
        return "$'" + "".join(f"\\x{byte:02x}" for byte in os.fsencode(word)) + "'"
    return shlex.quote(word)


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or (not equals and name not in os.environ):
        raise Failure(f"--env takes NAME=VALUE, not {text!r}", "or NAME alone, for a variable that is set here")
    return name, value if equals else os.environ[name]

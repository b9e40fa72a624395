"""Running `sandbox` as a process: until it ends, beside the test, or on a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.prepared.cli import prepared_cli
from tests.support.prepared.process import PreparedCommand
from tests.support.prepared.service import REAL_SERVICE_VARIABLE
from tests.support.service import clean_environ

PROGRAM = (sys.executable, "-m", "env_client.cli")
ROOT = Path(__file__).parents[3]
WAIT_S = 50.0
CODES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class SandboxCommand:
    """The command `sandbox` with an environment and a working folder.

    Args:
        environ: the environment, which names the service.
        cwd: the working folder.
    """

    def __init__(self, environ: Mapping[str, str], cwd: Path) -> None:
        self.environ = clean_environ({"PYTHONPATH": str(ROOT), **environ})
        self.cwd = cwd

    def with_real_service(self) -> SandboxCommand:
        """Return the same command line, whose own service is a real process in its family of processes."""
        return SandboxCommand({**self.environ, REAL_SERVICE_VARIABLE: "1"}, self.cwd)

    def __call__(self, *words: str, stdin: bytes | None = None, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a command line and wait for its end."""
        return prepared_cli().run(words, {**self.environ, **(environ or {})}, self.cwd, stdin, WAIT_S)

    def out(self, *words: str, stdin: bytes | None = None) -> str:
        """Run a command line that must succeed; return its standard output."""
        done = self(*words, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def json(self, *words: str) -> Any:
        """Run a command with `--json`; return the document that it prints."""
        name, *rest = words
        return json.loads(self.out(name, "--json", *rest))

    @contextmanager
    def started(self, *words: str, stdout: int | None = None, stderr: int | None = None) -> Iterator[PreparedCommand]:
        """Run a command line beside the test, with pipes for its output or with the given descriptors."""
        with open(os.devnull, "rb") as nothing:
            command = prepared_cli().start(words, self.environ, self.cwd, (nothing.fileno(), stdout, stderr))
        with command:
            yield command

    @contextmanager
    def on_terminal(self, *words: str, environ: Mapping[str, str] | None = None) -> Iterator[Terminal]:
        """Run a command line on a pseudo-terminal."""
        ours, its = pty.openpty()
        terminal = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **(environ or {})}
        try:
            command = prepared_cli().start(words, self.environ | terminal, self.cwd, (its, its, its), has_terminal=True)
            os.close(its)
            with command:
                yield Terminal(ours, command)
        finally:
            os.close(ours)


class Terminal:
    """A pseudo-terminal and the process that runs on it."""

    def __init__(self, descriptor: int, process: PreparedCommand) -> None:
        self.descriptor = descriptor
        self._process = process
        self.shown = b""

    def type(self, keys: bytes) -> None:
        """Send keys to the process."""
        os.write(self.descriptor, keys)

    def wait_for(self, text: bytes) -> None:
        """Wait until the terminal shows a text."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} did not come: {self.shown!r}"

    def end(self) -> int:
        """Wait for the end of the process; return its exit code."""
        deadline = time.monotonic() + WAIT_S
        while self._read(deadline):
            pass
        return self._process.wait(WAIT_S)

    @property
    def pid(self) -> int:
        """The process id of the process."""
        return self._process.pid

    @property
    def text(self) -> str:
        """The text on the terminal, without control sequences."""
        return CODES.sub(b"", self.shown).decode().replace("\r\n", "\n")

    def _read(self, deadline: float) -> bool:
        readable, _, _ = select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"nothing came for {WAIT_S:.0f} s: {self.shown!r}"
        try:
            chunk = os.read(self.descriptor, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += chunk
        return bool(chunk)

"""Running `sandbox`: to its end, step by step, and on a terminal."""

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

from tests.support.prepared_cli import prepared_cli
from tests.support.service import clean_environ

PROGRAM = (sys.executable, "-m", "env_client.cli")
ROOT = Path(__file__).parents[3]
WAIT_S = 50.0
CODES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]")


class CommandLine:
    """`sandbox`, as a person or a script calls it.

    Args:
        environ: by which it finds its service.
        cwd: where it is called.
    """

    def __init__(self, environ: Mapping[str, str], cwd: Path) -> None:
        self.environ = clean_environ({"PYTHONPATH": str(ROOT), **environ})
        self.cwd = cwd

    def __call__(self, *words: str, stdin: bytes | None = None, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run it to its end."""
        return prepared_cli().run(words, {**self.environ, **(environ or {})}, self.cwd, stdin, WAIT_S)

    def out(self, *words: str, stdin: bytes | None = None) -> str:
        """What it prints where it must succeed."""
        done = self(*words, stdin=stdin)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode()

    def json(self, *words: str) -> Any:
        """The one document that it prints."""
        name, *rest = words
        return json.loads(self.out(name, "--json", *rest))

    @contextmanager
    def started(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run it beside the test, with pipes."""
        with subprocess.Popen(
            [*PROGRAM, *words], env=self.environ, cwd=self.cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    @contextmanager
    def on_terminal(self, *words: str, environ: Mapping[str, str] | None = None) -> Iterator[Terminal]:
        """Run it on a terminal of its own."""
        ours, its = pty.openpty()
        terminal = {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40", **(environ or {})}
        command = ["setsid", "--ctty", *PROGRAM, *words]
        with subprocess.Popen(command, env=self.environ | terminal, cwd=self.cwd, stdin=its, stdout=its, stderr=its) as process:
            os.close(its)
            try:
                yield Terminal(ours, process)
            finally:
                process.kill()
                os.close(ours)


class Terminal:
    """A terminal, and what runs on it."""

    def __init__(self, descriptor: int, process: subprocess.Popen[bytes]) -> None:
        self._descriptor = descriptor
        self._process = process
        self.shown = b""

    def type(self, keys: bytes) -> None:
        """Press keys."""
        os.write(self._descriptor, keys)

    def wait_for(self, text: bytes) -> None:
        """Wait until it shows a text."""
        deadline = time.monotonic() + WAIT_S
        while text not in self.shown:
            assert self._read(deadline), f"{text!r} did not come: {self.shown!r}"

    def end(self) -> int:
        """Wait for its end; returns the exit code."""
        deadline = time.monotonic() + WAIT_S
        while self._read(deadline):
            pass
        return self._process.wait(WAIT_S)

    @property
    def text(self) -> str:
        """What it shows, without colours."""
        return CODES.sub(b"", self.shown).decode().replace("\r\n", "\n")

    def _read(self, deadline: float) -> bool:
        readable, _, _ = select.select([self._descriptor], [], [], max(0.0, deadline - time.monotonic()))
        assert readable, f"nothing came for {WAIT_S:.0f} s: {self.shown!r}"
        try:
            chunk = os.read(self._descriptor, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += chunk
        return bool(chunk)

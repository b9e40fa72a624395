"""Tests of `sandbox shell` and `sandbox attach` on a pseudo-terminal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

from tests.integration.cli.sandbox_command import SandboxCommand, Terminal

WAIT_S = 30.0
SESSION = {"type": "session", "session": "t-1", "new": True, "writer": True, "cols": 80, "rows": 24}


def flags_of(terminal: Terminal) -> list[int]:
    """The modes of the local terminal."""
    return [int(flags) for flags in termios.tcgetattr(terminal.descriptor)[:4]]


def test_a_shell_is_worked_in_and_its_exit_code_passed_on(sandbox: SandboxCommand, lease: str) -> None:
    with sandbox.on_terminal("shell", lease) as terminal:
        before = flags_of(terminal)
        fcntl.ioctl(terminal.descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
        terminal.wait_for(b"$ ")
        assert flags_of(terminal) != before
        terminal.type(b"echo ready; cat > kept; stty size; tty; echo do''ne\r")
        terminal.wait_for(b"\rready\r\n")
        terminal.type(b"typed into cat\r\x04")
        terminal.wait_for(b"done\r\n")
        terminal.type(b"""sh -c 'trap "exit 3" INT; echo begun; sleep 31342'; echo in''terrupted $?\r""")
        terminal.wait_for(b"\rbegun\r\n")
        terminal.type(b"\x03")  # it discards what was typed before and not read yet, so nothing is typed until it is done
        terminal.wait_for(b"interrupted 3")
        terminal.type(b"exit 9\r")

        assert terminal.end() == 9
        assert flags_of(terminal) == before
    assert "33 111\n/dev/pts/" in terminal.text.replace("\r", "")
    assert sandbox.out("exec", lease, "--", "cat", "kept") == "typed into cat\n"


def test_a_person_leaves_a_shell_and_returns_to_it_while_another_watches(sandbox: SandboxCommand, lease: str) -> None:
    with sandbox.on_terminal("shell", lease) as terminal:
        before = flags_of(terminal)
        terminal.wait_for(b"$ ")
        terminal.type(b"name=kept; printf '\\033[?1049h%s' full''screen\r")
        terminal.wait_for(b"fullscreen")
        terminal.type(b"\r~.")

        assert terminal.end() == 0
        assert flags_of(terminal) == before
    assert b"\x1b[?1049l" in terminal.shown
    found = re.search(rf"the shell runs on; return with: sandbox shell {lease} --session (\S+)", terminal.text)
    assert found is not None
    with sandbox.on_terminal("attach", lease) as watching, sandbox.on_terminal("shell", lease, "--session", found[1]) as again:
        watching.wait_for(b"fullscreen")
        again.wait_for(b"fullscreen")
        again.type(b"echo $name, ''and back; exit 4\r")
        assert again.end() == 4
        assert watching.end() == 0
    assert "kept, and back" in again.text
    assert "kept, and back" in watching.text
    assert "the shell has ended with exit code 4" in watching.text


def test_what_is_watched_is_left_with_ctrl_c(sandbox: SandboxCommand, lease: str) -> None:
    with sandbox.on_terminal("shell", lease, "--session", "main") as terminal:
        terminal.wait_for(b"$ ")
        with sandbox.on_terminal("attach", lease, "--session", "main") as watching:
            watching.wait_for(b"$ ")
            terminal.type(b"echo seen by ''both\r")
            watching.wait_for(b"seen by both")
            watching.type(b"ignored\r\x03")
            assert watching.end() == 0
        terminal.type(b"exit\r")
        assert terminal.end() == 0
    assert "ignored" not in terminal.text


def test_the_release_of_the_lease_ends_the_shell_with_a_sentence(sandbox: SandboxCommand, lease: str) -> None:
    with sandbox.on_terminal("shell", lease) as terminal:
        before = flags_of(terminal)
        terminal.wait_for(b"$ ")
        sandbox.out("release", lease)

        assert terminal.end() == 125
        assert flags_of(terminal) == before
    assert "released" in terminal.text
    assert "`sandbox leases` lists those you hold" in " ".join(terminal.text.split())


def test_a_signal_ends_the_shell_and_restores_the_terminal(sandbox: SandboxCommand, lease: str) -> None:
    with sandbox.on_terminal("shell", lease) as terminal:
        before = flags_of(terminal)
        terminal.wait_for(b"$ ")
        os.kill(terminal.pid, 15)

        assert terminal.end() == 143
        assert flags_of(terminal) == before
    assert "Traceback" not in terminal.text


def test_what_cannot_be_done_is_said(sandbox: SandboxCommand, lease: str) -> None:
    without_terminal = sandbox("shell", lease, stdin=b"ls\n")
    assert without_terminal.returncode == 125
    assert b"standard input is not a terminal" in without_terminal.stderr
    nothing_to_watch = sandbox("attach", lease, stdin=b"")
    assert nothing_to_watch.returncode == 125
    assert b"the lease has no terminal to watch; those it has: none" in nothing_to_watch.stderr
    no_lease = sandbox("attach", "l-nobody", stdin=b"")
    assert no_lease.returncode == 125
    assert b"there is no lease 'l-nobody'" in no_lease.stderr


class LosingService:
    """A service whose terminals are lost as soon as they are open, and which at some time responds to no handshake any more.

    Args:
        reported_count: how many connections get a report before they are lost. The others are closed without one.
        accepted_count: how many handshakes get a response.
    """

    def __init__(self, reported_count: int, accepted_count: int) -> None:
        self._reported_count = reported_count
        self._accepted_count = accepted_count
        self._handshake_count = 0
        self._ended = threading.Event()
        self.is_silent = threading.Event()

    @contextmanager
    def running(self) -> Iterator[dict[str, str]]:
        """Listen for the duration of the block. Gives the environment that names the service."""
        with serve(self._lose, "127.0.0.1", 0, process_request=self._respond) as server:
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            try:
                yield {"SANDBOX_URL": f"http://127.0.0.1:{server.socket.getsockname()[1]}", "SANDBOX_TOKEN": "token"}
            finally:
                self._ended.set()
                server.shutdown()
                thread.join()

    def _respond(self, _connection: ServerConnection, _request: Request) -> Response | None:
        self._handshake_count += 1
        if self._handshake_count > self._accepted_count:
            self.is_silent.set()
            self._ended.wait()
        return None

    def _lose(self, connection: ServerConnection) -> None:
        if self._handshake_count <= self._reported_count:
            connection.send(json.dumps(SESSION))
        connection.close(1011, "lost")


@pytest.mark.parametrize("keys", [b"~.", b"\x03", b"typed\r~."])
@pytest.mark.parametrize("connected_count", [0, 1])
def test_a_person_leaves_while_the_terminal_connects(sandbox: SandboxCommand, connected_count: int, keys: bytes) -> None:
    service = LosingService(connected_count, connected_count)
    with service.running() as environ, sandbox.on_terminal("shell", "lease-1", environ=environ) as terminal:
        before = flags_of(terminal)
        assert service.is_silent.wait(WAIT_S)
        assert flags_of(terminal) != before
        terminal.type(keys)

        assert terminal.end() == 0
        assert flags_of(terminal) == before
    assert ("the shell runs on; return with: sandbox shell lease-1 --session t-1" in terminal.text) == bool(connected_count)


def test_a_service_that_accepts_terminals_but_cannot_serve_them_is_an_error(sandbox: SandboxCommand) -> None:
    with LosingService(0, 1000).running() as environ:
        done = sandbox("attach", "lease-1", environ=environ)

    assert done.returncode != 0
    assert b"the connection to the terminal was lost: lost" in done.stderr


def test_a_terminal_is_as_before_after_sigquit(sandbox: SandboxCommand) -> None:
    service = LosingService(0, 0)
    with service.running() as environ, sandbox.on_terminal("shell", "lease-1", environ=environ) as terminal:
        before = flags_of(terminal)
        assert service.is_silent.wait(WAIT_S)
        os.kill(terminal.pid, signal.SIGQUIT)

        assert terminal.end() == -signal.SIGQUIT
        assert flags_of(terminal) == before

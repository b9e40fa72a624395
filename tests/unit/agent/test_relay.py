"""The relay: bytes both ways, whole and at the reader's pace; it ends when either side does, and leaves no process behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sandbox_server.agent import relay

COMMAND = [sys.executable, "-I", "-S", relay.__file__]
BIG = bytes(range(256)) * (16 << 10)  # 4 MiB
WITHIN_S = 20
SERVICE = """
import subprocess, sys, time
relay = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
print(relay.pid, flush=True)
time.sleep(1000)
"""


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "agent.sock"))
        listener.listen()
        listener.settimeout(WITHIN_S)
        yield listener


@pytest.fixture
def start(listener: socket.socket) -> Iterator[Callable[[], tuple[subprocess.Popen[bytes], socket.socket]]]:
    """Starts a relay: its process, and the agent's end of it."""
    with contextlib.ExitStack() as stack:

        def start() -> tuple[subprocess.Popen[bytes], socket.socket]:
            command = [*COMMAND, listener.getsockname()]
            process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            stack.callback(process.kill)
            agent = stack.enter_context(listener.accept()[0])
            agent.settimeout(WITHIN_S)
            return process, agent

        yield start


def received(agent: socket.socket) -> bytes:
    whole = b""
    while data := agent.recv(1 << 20):
        whole += data
    return whole


def test_all_input_reaches_the_agent_before_the_relay_ends(start) -> None:
    process, agent = start()
    writer = threading.Thread(target=lambda: (process.stdin.write(BIG), process.stdin.close()))
    writer.start()

    assert received(agent) == BIG
    writer.join()
    assert process.wait(WITHIN_S) == 0


def test_all_output_of_the_agent_is_passed_on_before_the_relay_ends(start) -> None:
    process, agent = start()
    writer = threading.Thread(target=lambda: (agent.sendall(BIG), agent.close()))
    writer.start()

    assert process.stdout.read() == BIG
    writer.join()
    assert process.wait(WITHIN_S) == 0
    assert process.stderr.read() == b""


def test_both_directions_are_copied_at_the_same_time(start) -> None:
    process, agent = start()
    heard: list[bytes] = []

    def exactly(read: Callable[[int], bytes]) -> None:
        whole = b""
        while len(whole) < len(BIG):
            whole += read(1 << 20)
        heard.append(whole)

    threads = [
        threading.Thread(target=work)
        for work in (
            lambda: agent.sendall(BIG),
            lambda: (process.stdin.write(BIG), process.stdin.flush()),
            lambda: exactly(agent.recv),
            lambda: exactly(lambda most: os.read(process.stdout.fileno(), most)),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN_S)

    assert heard == [BIG, BIG]


def test_a_slow_reader_slows_the_writer_down(start) -> None:
    """What waits in a relay is a chunk each way, and what the kernel holds in between."""
    process, agent = start()
    os.set_blocking(process.stdin.fileno(), False)
    agent.setblocking(False)

    assert _taken(lambda data: os.write(process.stdin.fileno(), data), process.stdin) < 4 << 20
    assert _taken(agent.send, agent) < 4 << 20


def _taken(write: Callable[[bytes], int], file: object) -> int:
    """How much is taken until nothing is for a while."""
    taken, block = 0, bytes(64 << 10)
    while select.select([], [file], [], 0.5)[1]:
        taken += write(block)
        assert taken < 64 << 20, "the relay keeps whatever it is given"
    return taken


def test_the_relay_ends_although_its_output_is_not_read(start) -> None:
    process, agent = start()
    agent.setblocking(False)
    _taken(agent.send, agent)
    process.stdin.close()

    assert process.wait(WITHIN_S) == 0


def test_the_relay_ends_when_its_reader_has_ended(start) -> None:
    process, agent = start()
    process.stdout.close()
    agent.sendall(b"for nobody")

    assert process.wait(WITHIN_S) == 0


def test_the_relay_ends_when_the_service_is_killed(listener: socket.socket) -> None:
    parent = subprocess.Popen([sys.executable, "-c", SERVICE, *COMMAND, listener.getsockname()], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    with parent, listener.accept()[0] as agent:
        relay_process = os.pidfd_open(int(parent.stdout.readline()))
        agent.settimeout(WITHIN_S)
        parent.send_signal(signal.SIGKILL)

        assert select.select([relay_process], [], [], WITHIN_S)[0], "the relay is still there"
        os.close(relay_process)
        with contextlib.suppress(ConnectionResetError):
            assert agent.recv(1) == b""


def test_an_idle_relay_uses_no_processor_time(start) -> None:
    process, agent = start()
    for _ in range(3):
        agent.sendall(b"x")
        assert os.read(process.stdout.fileno(), 1) == b"x"
    before = _cpu_ticks(process.pid)
    assert not select.select([process.stdout], [], [], 0.5)[0]

    assert _cpu_ticks(process.pid) - before <= 2  # hundredths of a second


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(("arguments", "problem"), [(["/nowhere/agent.sock"], b"cannot connect to the agent at /nowhere/agent.sock: "), ([], b"usage: ")])
def test_the_relay_reports_why_it_ends(arguments: list[str], problem: bytes) -> None:
    ran = subprocess.run([*COMMAND, *arguments], stdin=subprocess.DEVNULL, capture_output=True, timeout=WITHIN_S, check=False)

    assert ran.returncode == 1
    assert ran.stderr.startswith(problem)
    assert ran.stdout == b""

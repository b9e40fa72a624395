"""What the agent and the shell of a session say to each other, and what a session does with it."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox_server.agent.execution.processes.slot_process import SlotProcess
from sandbox_server.agent.execution.processes.spawn_spec import PIPES, TTY, program_spec
from sandbox_server.agent.execution.sessions.control_socket import ControlSocket
from sandbox_server.agent.execution.sessions.session import Session
from sandbox_server.agent.execution.sessions.session_turn import RUNNING, SessionTurn
from sandbox_server.agent.execution.sessions.shell_protocol import MAX_MESSAGE_BYTES, READY, needs_check, parse_reports


@pytest.mark.parametrize(
    ("data", "reports", "bad_count", "rest"),
    [
        (b"1 0\n", [(1, 0)], 0, b""),
        (b"1 0\n2 255\n3", [(1, 0), (2, 255)], 0, b"3"),
        (b"1 256\n", [], 1, b""),
        (b"x\n-1 0\n1 0 \n\n7 7\n", [(7, 7)], 4, b""),
        (b"\xff" * (MAX_MESSAGE_BYTES + 1), [], 1, b""),
        (b"1234567890 0\n", [], 1, b""),
        (b"", [], 0, b""),
    ],
)
def test_only_reports_are_read_and_the_rest_is_bounded(data: bytes, reports: list[tuple[int, int]], bad_count: int, rest: bytes) -> None:
    assert parse_reports(data) == (reports, bad_count, rest)


def test_what_could_run_in_part_or_harm_the_shell_is_checked_first() -> None:
    assert all(map(needs_check, (b"echo a\nif true", b"echo $(", b"echo `", b"cat <(", b"tee >(")))
    assert not any(map(needs_check, (b"true", b"echo 'a", b"cd x && make\n", b"echo $HOME ${x}")))


class _StubProcesses:
    """Counts the signals that a command gets. Only the shell lives."""

    def __init__(self) -> None:
        self.sent = 0

    def send_signal(self, which: int, already: dict[int, int]) -> tuple[int, int]:
        self.sent += 1
        return 0, 1

    def kill_living(self) -> int:
        return 0


class _StubShell:
    """A shell that answers each request for a report at once, and whose file for commands cannot be written if `is_full`."""

    pid = 5
    kill_reason = ""

    def __init__(self, session: Session, *, is_full: bool = False) -> None:
        self._session = session
        self._is_full = is_full
        self.process = SimpleNamespace(read_all_output=lambda: None)

    def send_report_request(self) -> int:
        asyncio.get_running_loop().call_soon(self._session.on_report, 9, 0)
        return 9

    def set_ready(self) -> None:
        pass

    def command_processes(self) -> None:
        if self._is_full:
            raise OSError(24, "Too many open files")

    def close_shell(self) -> None:
        pass


class _StubCall:
    """Records what becomes of a call."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        self.ends.append("ended")

    def on_shell_failed(self, detail: str) -> None:
        self.ends.append(detail)


def _running_turn(awaited: int, *, is_full: bool = False) -> tuple[Session, SessionTurn, _StubCall, _StubProcesses]:
    session = Session(cast(Any, None), cast(Any, None))
    call, processes = _StubCall(), _StubProcesses()
    turn = SessionTurn(session, cast(Any, None), b"true", (cast(Any, None),), cast(Any, call))
    turn.state, turn.processes = RUNNING, cast(Any, processes)
    session._turn, session._shell, session._awaited = turn, cast(Any, _StubShell(session, is_full=is_full)), awaited
    return session, turn, call, processes


async def test_a_command_that_ends_just_before_the_agent_ends_it_is_interrupted_once() -> None:
    session, turn, _, processes = _running_turn(3)
    session.on_report(3, 0)

    assert await session.end_turn(turn) == {"signal": "SIGINT"}
    assert processes.sent == 1
    assert session.has_shell


async def test_the_end_of_an_abandoned_command_leaves_the_reports_of_the_next_call_alone() -> None:
    session, turn, _, _ = _running_turn(3)
    ending = asyncio.create_task(session.end_turn(turn))
    await asyncio.sleep(0)
    session.close_session("its slot was reset")
    following = _running_turn(READY)
    session._turn, session._shell, session._awaited = following[1], cast(Any, _StubShell(session, is_full=True)), READY
    session.on_report(READY, 0)

    assert "Too many open files" in following[2].ends[0]
    await ending
    assert session.has_shell


async def test_a_command_that_cannot_be_given_to_its_shell_fails_its_call() -> None:
    session, _, call, _ = _running_turn(READY, is_full=True)
    session.on_report(READY, 0)

    assert len(call.ends) == 1
    assert "Too many open files" in call.ends[0]


async def test_reports_without_end_leave_the_event_loop_time_for_others() -> None:
    reports: list[int] = []
    control = ControlSocket(lambda number, status: reports.append(number), lambda: None)
    try:
        flood = b"7 0\n" * 1000
        os.write(control.shell_fd(), flood)
        while not reports:
            await asyncio.sleep(0)
        read = len(reports)
        os.write(control.shell_fd(), flood)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(reports) == read
        while len(reports) < 2000:
            await asyncio.sleep(0.01)
    finally:
        control.close_control()


@pytest.mark.parametrize("stdio", [PIPES, TTY])
async def test_a_shell_that_cannot_be_requested_gives_its_control_group_back(stdio: str) -> None:
    def refuse(request: Any, fds: Any, listener: Any) -> int:
        raise OSError(24, "Too many open files")

    leaf = SimpleNamespace(is_in_use=True)
    groups = SimpleNamespace(leaves=SimpleNamespace(take_leaf=lambda: (leaf, -1)))
    runtime = SimpleNamespace(groups=groups, link=SimpleNamespace(start_process=refuse), uid=None)
    process = SlotProcess(cast(Any, runtime), cast(Any, None), (), cast(Any, None))

    with pytest.raises(OSError, match="Too many open files"):
        process.start_process(program_spec(["true"], None, "/", stdio=stdio))
    assert not leaf.is_in_use

"""The sessions of one lease."""

from __future__ import annotations

from typing import Sequence

from sandbox_server.agent.errors import ToolError
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.output import Sink
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.sessions.session import Session
from sandbox_server.agent.execution.sessions.session_turn import SessionCall, SessionTurn
from sandbox_server.agent.execution.slot_runtime import SlotRuntime

MAX_SESSIONS = 32  # that have a shell or a call
_MAX_REMEMBERED = 256  # that have none: their next call says why the shell is gone


class LeaseSessions:
    """The sessions of one lease, by name.

    Args:
        drains: takes over the pipes of shells that have ended.
        tasks: runs background tasks.
    """

    def __init__(self, drains: Drains, tasks: BackgroundTasks) -> None:
        self._drains = drains
        self._tasks = tasks
        self._sessions: dict[str, Session] = {}

    def count_shells(self) -> int:
        """How many sessions have a shell."""
        return sum(session.has_shell for session in self._sessions.values())

    def add_call(self, name: str, runtime: SlotRuntime, command: bytes, sinks: Sequence[Sink], call: SessionCall) -> tuple[Session, SessionTurn]:
        """Return the session with this name, made if there is none, and a turn of the call in it. The caller adds the turn to the session.

        Raises:
            ToolError: the lease has as many sessions as it may have.
        """
        session = self._sessions.get(name)
        if session is None or session.is_idle:
            active = [other for other, session in self._sessions.items() if not session.is_idle]
            if len(active) >= MAX_SESSIONS:
                raise ToolError(
                    "the slot has %d sessions already, and at most %d are allowed; `exit` in one of them ends it: %s"
                    % (len(active), MAX_SESSIONS, ", ".join(sorted(active)[:5]))
                )
        if session is None:
            self._forget_oldest()
            session = self._sessions[name] = Session(self._drains, self._tasks)
        return session, SessionTurn(session, runtime, command, sinks, call)

    def _forget_oldest(self) -> None:
        idle = [name for name, session in self._sessions.items() if session.is_idle]
        for name in idle[: max(0, len(idle) - _MAX_REMEMBERED + 1)]:
            del self._sessions[name]

    def hold_sessions(self) -> None:
        """Begin no further call: the processes of the slot are about to be ended."""
        for session in self._sessions.values():
            session.hold()

    def close_sessions(self, reason: str) -> None:
        """Forget all shells and calls. Their processes are ended with the slot runtime; `reason` says why."""
        for session in self._sessions.values():
            session.close_session(reason)

"""One call in a session: what the call knows of the session, and the session of the call."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol, Sequence

from sandbox_server.agent.execution.output import Sink
from sandbox_server.agent.execution.processes.slot_process import SlotProcess
from sandbox_server.agent.execution.sessions.command_processes import CommandProcesses
from sandbox_server.agent.execution.slot_runtime import SlotRuntime

WAITING, RUNNING, OVER = "waiting", "running", "over"


class SessionCall(Protocol):
    """The call of which a turn tells how it goes."""

    def on_turn_began(self, own_processes: int) -> None:
        """The calls before this one have ended.

        Args:
            own_processes: how many processes of the slot are the shell of the session.
        """

    def watch_process(self, process: SlotProcess) -> None:
        """This process is the shell in which the command runs."""

    def on_output(self) -> None:
        """Some output was read."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """The command has ended, see `ProcessListener`."""

    def on_process_refused(self, errno: int, step: str) -> None:
        """The shell could not be started, see `ProcessListener`."""

    def on_init_lost(self, detail: str) -> None:
        """Init has ended, and all processes of the slot with it."""

    def on_shell_failed(self, detail: str) -> None:
        """The command did not run, because the shell could not be set up."""


class TurnQueue(Protocol):
    """The session of a turn."""

    def read_output(self, turn: SessionTurn) -> None:
        """Read what the command has written so far."""

    def poll_reports(self, turn: SessionTurn) -> None:
        """Process what the shell has reported and the event loop has not processed yet."""

    def remove_turn(self, turn: SessionTurn) -> None:
        """The call of the turn has ended; the next one can begin."""

    async def end_turn(self, turn: SessionTurn) -> dict[str, Any]:
        """End the command. Returns the evidence."""


class SessionTurn:
    """One call in a session.

    Args:
        session: the session.
        runtime: the slot runtime in which the call runs.
        command: the command.
        sinks: the receivers of its output: one, or one for each stream.
        call: hears how it goes.
    """

    def __init__(self, session: TurnQueue, runtime: SlotRuntime, command: bytes, sinks: Sequence[Sink], call: SessionCall) -> None:
        self._session = session
        self.runtime = runtime
        self.command = command
        self.sinks = sinks
        self.call = call
        self.state = WAITING
        self.processes: CommandProcesses | None = None  # those of the command; None: it has not begun
        self.report_event: asyncio.Event | None = None  # set at the awaited report and at the end of the shell, while the agent ends the command
        self.lost_before = ""  # why the shell of the earlier calls is gone
        self.lost_by = ""  # why the shell is gone after this call
        self.killed_cpu_s = 0.0  # see `SlotProcess`; what a command has used is counted in the control group of the session

    @property
    def has_two_streams(self) -> bool:
        """Whether standard error is kept apart."""
        return len(self.sinks) > 1

    def metadata(self) -> dict[str, Any]:
        """What the result says about the session."""
        if self.lost_by:
            after = "%s; the next command gets a new shell, without the working folder, the variables, the functions and the jobs of this one" % self.lost_by
            return {"session": "restarted", "session_reason": after}
        if self.lost_before:
            before = "before this command, %s; it ran in a new shell, without the working folder, the variables, the functions and the jobs of the earlier one"
            return {"session": "restarted", "session_reason": before % self.lost_before}
        return {"session": "kept"}

    def describe_end(self) -> str:
        """How the agent has ended the command, as the end of a sentence."""
        if self.state == WAITING:
            return "while it waited for the earlier calls of its session, so it did not run"
        if self.lost_by:
            return "and was ended together with the shell of its session"
        return "and was interrupted; the shell of its session goes on"

    async def wait_for_report(self, timeout_s: float) -> bool:
        """Wait until the awaited report is there, or the shell has ended. Returns False if that takes more than `timeout_s` seconds."""
        event = self.report_event
        if event is None:
            return True
        try:
            await asyncio.wait_for(event.wait(), timeout_s)
        except asyncio.TimeoutError:
            return False
        return True

    # What the call uses, as it uses a `SlotProcess`.

    def poll_output(self) -> None:
        """Read what the command has written and the shell has reported so far."""
        self._session.read_output(self)
        self._session.poll_reports(self)

    def collect_output(self) -> None:
        """Read what the command has written, because it has ended."""
        self._session.read_output(self)

    async def end_tree(self) -> dict[str, Any]:
        """End the command, and its shell if that does not react. Returns the evidence."""
        return await self._session.end_turn(self)

    async def wait_until_over(self, timeout_s: float) -> bool:
        """See `SlotProcess`. `end_tree` has waited already."""
        return True

    def leave_session(self) -> None:
        """The call has ended."""
        self._session.remove_turn(self)

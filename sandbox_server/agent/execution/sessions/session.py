"""A session: one shell that stays, and the calls that run in it one after another."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from typing import Any, Deque

from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.sessions.interruption import REACT_WITHIN_S, interrupt_command
from sandbox_server.agent.execution.sessions.session_output import SessionOutput
from sandbox_server.agent.execution.sessions.session_shell import SessionShell
from sandbox_server.agent.execution.sessions.session_turn import OVER, RUNNING, WAITING, SessionTurn
from sandbox_server.agent.execution.sessions.shell_protocol import READY, needs_check

_OVER_WITHIN_S = 0.5
_ASK_AGAIN_S = 0.3
_SYNTAX_ERROR_STATUS = 2  # as bash exits with it


class Session:
    """One session of a lease.

    Args:
        drains: takes over the pipes of shells that have ended.
        tasks: runs the background task that kills a shell.
    """

    def __init__(self, drains: Drains, tasks: BackgroundTasks) -> None:
        self._drains = drains
        self._tasks = tasks
        self._loop = asyncio.get_event_loop()
        self._queue: Deque[SessionTurn] = deque()
        self._turn: SessionTurn | None = None
        self._shell: SessionShell | None = None
        self._outputs = (SessionOutput(), SessionOutput())
        self._awaited = READY  # the number of the report that is awaited
        self._is_checking = False
        self._has_reported = False
        self._lost_reason = ""  # why the last shell is gone, for the next call; empty if none is
        self._is_held = False

    @property
    def has_shell(self) -> bool:
        """Whether the session has a shell."""
        return self._shell is not None

    @property
    def is_idle(self) -> bool:
        """Whether the session has neither a shell nor a call."""
        return self._shell is None and self._turn is None and not self._queue

    def add_turn(self, turn: SessionTurn) -> None:
        """Run a call as soon as all calls before it have ended."""
        self._queue.append(turn)
        self._begin_next()

    def remove_turn(self, turn: SessionTurn) -> None:
        """See `TurnQueue`."""
        if turn in self._queue:
            self._queue.remove(turn)
        turn.state = OVER
        if turn is self._turn:
            self._turn = None
            for output in self._outputs:
                output.end_call()
            if self._queue:
                self._loop.call_soon(self._begin_next)

    def _begin_next(self) -> None:
        if self._turn is not None or not self._queue or self._is_held:
            return
        turn = self._turn = self._queue.popleft()
        try:
            self._begin_turn(turn)
        except OSError as error:
            self._lost_reason = turn.lost_before
            turn.call.on_shell_failed("the agent could not start the shell of the session: %s" % error)

    def _begin_turn(self, turn: SessionTurn) -> None:
        turn.state = RUNNING
        turn.call.on_turn_began(1 if self._shell is not None else 0)
        self._has_reported = False
        turn.lost_before, self._lost_reason = self._lost_reason, ""
        if self._shell is not None:
            turn.call.watch_process(self._shell.process)
            self._send_command(self._shell, turn)
            return
        self._awaited = READY
        for output in self._outputs:
            output.discard()
        self._shell = SessionShell(turn.runtime, self._drains, self._outputs, self)
        turn.call.watch_process(self._shell.process)

    def _send_command(self, shell: SessionShell, turn: SessionTurn) -> None:
        self._outputs[0].begin_call(turn.sinks[0])
        self._outputs[1].begin_call(turn.sinks[-1])
        turn.processes = shell.command_processes()
        self._is_checking = needs_check(turn.command)
        send = shell.send_check if self._is_checking else shell.send_command
        self._awaited = send(turn.command, turn.has_two_streams)

    def read_output(self, turn: SessionTurn) -> None:
        """See `TurnQueue`."""
        if turn is self._turn and self._shell is not None:
            self._shell.process.read_all_output()

    def poll_reports(self, turn: SessionTurn) -> None:
        """See `TurnQueue`."""
        if turn is self._turn and self._shell is not None:
            self._shell.poll_reports()

    # What the shell does.

    def on_output(self) -> None:
        """See `ShellOwner`."""
        if self._turn is not None:
            self._turn.call.on_output()

    def on_report(self, number: int, status: int) -> None:
        """See `ShellOwner`. A report that is not awaited is left from a command that was ended, or a command has made it up."""
        shell, turn = self._shell, self._turn
        if number != self._awaited or shell is None or turn is None or self._has_reported:
            return
        is_ready, is_checked = number == READY, self._is_checking and status == 0
        if turn.report_event is not None:
            self._has_reported = True
            turn.report_event.set()
        elif is_ready or is_checked:
            try:
                self._send_next(shell, turn, is_ready=is_ready)
            except OSError as error:
                turn.call.on_shell_failed("the agent could not give the shell of the session its command: %s" % error)
        else:
            self._has_reported = True
            turn.call.on_process_ended((_SYNTAX_ERROR_STATUS if self._is_checking else status) << 8, 0.0, 0)

    def _send_next(self, shell: SessionShell, turn: SessionTurn, *, is_ready: bool) -> None:
        if is_ready:
            shell.set_ready()
            shell.process.read_all_output()  # discarded: bash has written that it has no terminal
            self._send_command(shell, turn)
        else:
            self._is_checking = False
            self._awaited = shell.send_command(turn.command, turn.has_two_streams)

    def on_protocol_broken(self) -> None:
        """See `ShellOwner`."""
        shell = self._shell
        if shell is not None:
            self._tasks.start_task(shell.kill_shell("its processes wrote to the control socket of the session, so its shell was killed", _OVER_WITHIN_S))

    def on_shell_ended(self, status: int) -> None:
        """See `ShellOwner`."""
        shell, turn = self._shell, self._turn
        is_ready = shell is not None and shell.pid != 0
        self._lose_shell(shell.kill_reason if shell is not None and shell.kill_reason else _describe_end(status, turn is not None))
        if turn is None or turn.report_event is not None:
            return
        if is_ready:
            turn.call.on_process_ended(status, 0.0, 0)
        else:
            turn.call.on_shell_failed("the shell of the session ended before it was ready (%s)" % _describe_status(status))

    def on_shell_refused(self, errno: int, step: str) -> None:
        """See `ShellOwner`."""
        turn = self._turn
        self._lose_shell("its shell could not be started (%s): %s" % (step, os.strerror(errno)))
        if turn is not None:
            turn.call.on_process_refused(errno, step)

    def on_shell_lost(self, detail: str) -> None:
        """See `ShellOwner`."""
        turn = self._turn
        self._lose_shell("all processes of the slot were ended")
        if turn is not None:
            turn.call.on_init_lost(detail)

    def _lose_shell(self, reason: str) -> None:
        """The shell is gone. The call that runs says so, and otherwise the next one does."""
        if self._shell is not None:
            self._shell.close_shell()
            self._shell = None
        if self._turn is not None:
            self._turn.lost_by = reason
            if self._turn.report_event is not None:
                self._turn.report_event.set()
        self._lost_reason = reason

    # The end of a command by the agent.

    async def end_turn(self, turn: SessionTurn) -> dict[str, Any]:
        """See `TurnQueue`. If the shell reads its next command afterwards, it stays; otherwise it is killed with all processes of the session.

        Raises:
            OSError: the request to init could not be sent.
        """
        if turn.state == WAITING:
            self._queue.remove(turn)
            return {"ran": False}
        shell = self._shell
        if shell is None or turn is not self._turn:
            return {}
        began = self._loop.time()
        turn.report_event = asyncio.Event()
        if self._has_reported:  # the command has ended since the agent decided to end it
            turn.report_event.set()
        evidence: dict[str, Any] = {}
        reason = "its shell had not started in time, so it was killed"
        try:
            if turn.processes is not None:
                evidence = await interrupt_command(turn.processes, turn.wait_for_report)
                if self._has_reported and await self._reads_again(turn, shell, began + REACT_WITHIN_S):
                    return evidence
                reason = "its shell did not react to the interrupt, so it was killed with its background jobs"
            if shell is self._shell:
                evidence["signal"] = "SIGKILL"
                await shell.kill_shell(reason, _OVER_WITHIN_S)
            return evidence
        finally:
            turn.report_event = None
            if shell is self._shell and not self._has_reported:
                self._lose_shell(reason)  # init has not reported the end of the killed shell yet

    async def _reads_again(self, turn: SessionTurn, shell: SessionShell, deadline: float) -> bool:
        """Make sure that the shell reads its next command. A request that an interrupt has cut off is sent again.

        Args:
            turn: the call whose command was ended.
            shell: the shell.
            deadline: until when to wait, as a time of the event loop.
        """
        while shell is self._shell and turn is self._turn and turn.report_event is not None:
            self._has_reported = False
            turn.report_event.clear()
            self._awaited = shell.send_report_request()
            if await turn.wait_for_report(_ASK_AGAIN_S) and self._has_reported:
                return shell is self._shell
            if self._loop.time() > deadline:
                return False
        return False

    # The end of the slot runtime.

    def hold(self) -> None:
        """Begin no further call: the processes of the slot are about to be ended."""
        self._is_held = True

    def close_session(self, reason: str) -> None:
        """Forget the shell and all calls, whose processes the caller ends; `reason` says why. Later calls get a new shell."""
        had_shell = self._shell is not None
        if self._turn is not None and self._turn.report_event is not None:
            self._turn.report_event.set()
        self._turn = None
        self._queue.clear()
        for output in self._outputs:
            output.end_call()
        if had_shell:
            self._lose_shell(reason)
        self._is_held = False


def _describe_status(status: int) -> str:
    if os.WIFSIGNALED(status):
        try:
            return "by %s" % signal.Signals(os.WTERMSIG(status)).name
        except ValueError:
            return "by signal %d" % os.WTERMSIG(status)
    return "with exit code %d" % os.WEXITSTATUS(status)


def _describe_end(status: int, in_command: bool) -> str:
    where = "during the command" if in_command else "between two commands"
    return "the shell of the session ended %s %s" % (where, _describe_status(status))

"""One bash of a session: its process, its pipes, and the socket and the file through which the agent controls it."""

from __future__ import annotations

import os
from typing import Protocol, Sequence

from sandbox_server.agent.execution.init_client.init_link import memfd
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.processes.slot_process import SlotProcess, Writable
from sandbox_server.agent.execution.processes.spawn_spec import program_spec
from sandbox_server.agent.execution.sessions import shell_protocol
from sandbox_server.agent.execution.sessions.command_processes import CommandProcesses, read_start
from sandbox_server.agent.execution.sessions.control_socket import ControlSocket
from sandbox_server.agent.execution.slot_runtime import SlotRuntime


class ShellOwner(Protocol):
    """Receives what happens to a shell, until the shell is closed."""

    def on_output(self) -> None:
        """A command has written something."""

    def on_report(self, number: int, status: int) -> None:
        """The shell has reported the status of what it was sent under this number."""

    def on_protocol_broken(self) -> None:
        """Too much has arrived that is no report of the shell."""

    def on_shell_ended(self, status: int) -> None:
        """The shell, or the program that it has executed in its place, has ended; `status` is as `os.wait4` returns it."""

    def on_shell_refused(self, errno: int, step: str) -> None:
        """The shell could not be started, see `ProcessListener`."""

    def on_shell_lost(self, detail: str) -> None:
        """Init has ended, and all processes of the slot with it."""


class SessionShell:
    """A running bash.

    Args:
        runtime: the slot runtime in which it runs.
        drains: takes over its pipes when it has ended, see `SlotProcess`.
        outputs: the receivers of what its commands write to standard output and to standard error.
        owner: receives what happens to it.

    Raises:
        OSError: the agent has no descriptors left for it.
    """

    def __init__(self, runtime: SlotRuntime, drains: Drains, outputs: Sequence[Writable], owner: ShellOwner) -> None:
        self.runtime = runtime
        self._owner = owner
        self._is_closed = False
        self.kill_reason = ""  # why the agent kills it; empty: it does not
        self.process = SlotProcess(runtime, drains, outputs, self)
        self._last_number = shell_protocol.READY
        self._start = 0
        self._control: ControlSocket | None = None
        self._command_fd = memfd("command", shell_protocol.start_script())
        try:
            control = self._control = ControlSocket(owner.on_report, owner.on_protocol_broken)
            argv = [runtime.shell, *shell_protocol.ARGUMENTS]
            spec = program_spec(argv, None, runtime.workspace, stdin_fd=control.shell_fd(), script_fd=self._command_fd, outlives_calls=True)
            self.process.start_process(spec)
        except OSError:
            self.close_shell()
            raise
        control.close_shell_end()

    @property
    def pid(self) -> int:
        """The process id of the shell as the agent sees it; 0 until it is ready."""
        return self._control.shell_pid if self._control is not None else 0

    def set_ready(self) -> None:
        """Record that the shell has reported that it is ready."""
        self._start = read_start(self.pid) or 0

    def command_processes(self) -> CommandProcesses:
        """What finds the processes of the command that begins next."""
        return CommandProcesses(self.runtime, self.process.leaf, (self.pid, self._start))

    def send_check(self, command: bytes, has_two_streams: bool) -> int:
        """Give the shell a command whose syntax it lets another bash check. Returns the number of the report."""
        self._write_command(command)
        return self._send(shell_protocol.check_line(self._next_number(), self.runtime.shell, has_two_streams))

    def send_command(self, command: bytes, has_two_streams: bool) -> int:
        """Give the shell a command to evaluate. Returns the number of the report."""
        self._write_command(command)
        return self._send(shell_protocol.run_lines(self._next_number(), has_two_streams))

    def send_report_request(self) -> int:
        """Make the shell send a report as soon as it reads. Returns the number of the report."""
        return self._send(shell_protocol.report_line(self._next_number()))

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _send(self, lines: bytes) -> int:
        if self._control is not None:
            self._control.send_lines(lines)
        return self._last_number

    def _write_command(self, command: bytes) -> None:
        os.ftruncate(self._command_fd, 0)
        done = 0
        while done < len(command):
            done += os.pwrite(self._command_fd, command[done:], done)

    def poll_reports(self) -> None:
        """Process the reports that have arrived and that the event loop has not processed yet."""
        if self._control is not None:
            self._control.poll_reports()

    async def kill_shell(self, reason: str, over_within_s: float) -> None:
        """Kill the shell with all processes of the session, and wait for its end; `reason` says why.

        Raises:
            OSError: the request to init could not be sent.
        """
        self.kill_reason = self.kill_reason or reason
        await self.process.end_tree(term_grace_s=0.0)
        await self.process.wait_until_over(over_within_s)

    def close_shell(self) -> None:
        """Close what the agent has open for the shell, whose process has ended or is being ended. Its owner hears of it no more."""
        self._is_closed = True
        if self._control is not None:
            self._control.close_control()
        self.process.collect_output()
        if self._command_fd >= 0:
            os.close(self._command_fd)
            self._command_fd = -1

    # The reports of the process.

    def on_still_running(self) -> None:
        """See `ProcessListener`. The shell has no deadlines; the calls that run in it have."""

    def on_output(self) -> None:
        """See `ProcessListener`."""
        self._owner.on_output()

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `ProcessListener`."""
        self.poll_reports()  # what the shell has reported before its end
        if not self._is_closed:
            self._owner.on_shell_ended(status)

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `ProcessListener`."""
        if not self._is_closed:
            self._owner.on_shell_refused(errno, step)

    def on_init_lost(self, detail: str) -> None:
        """See `ProcessListener`."""
        if not self._is_closed:
            self._owner.on_shell_lost(detail)

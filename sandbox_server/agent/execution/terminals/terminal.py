"""One terminal of a lease: an interactive shell on a pseudo-terminal of the slot, its recent output, and its viewers."""

from __future__ import annotations

import asyncio
import os
from typing import Any, Callable, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.processes.slot_process import SlotProcess
from sandbox_server.agent.execution.processes.spawn_spec import TTY, SpawnSpec, program_spec
from sandbox_server.agent.execution.processes.terminal_master import NoTerminal, TerminalMaster, receive_master
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.execution.terminals.scrollback import Scrollback
from sandbox_server.agent.execution.terminals.viewer import Viewer

#: The program waits while its writer has not read so much of what it has written.
AHEAD_BYTES = 64 << 10
OPEN_WITHIN_S = 20.0
_REST_BYTES = 128 << 10
#: A history file would be a file in the workspace that no command of the lease has written.
_ENVIRONMENT = {"TERM": "xterm-256color", "HISTFILE": ""}


def shell_spec(runtime: SlotRuntime) -> SpawnSpec:
    """An interactive shell in the workspace, with the environment of the slot."""
    return program_spec([runtime.shell], _ENVIRONMENT, runtime.workspace, stdio=TTY, outlives_calls=True)


class Terminal:
    """One terminal.

    The pace of the program is that of the writer: while the writer does not read, the program waits. Nobody else can slow it down: a viewer that only watches
    and does not keep up skips output. Without a writer, the program runs on.

    Args:
        name: names the terminal within its lease.
        size: the columns and rows of its window.
        tasks: runs background tasks.
        on_end: called once the shell has ended or could not be started.
    """

    def __init__(self, name: str, size: tuple[int, int], tasks: BackgroundTasks, on_end: Callable[[Terminal], None]) -> None:
        self.name = name
        self.size = size
        self.scrollback = Scrollback()
        self.viewers: list[Viewer] = []
        self.writer: Viewer | None = None
        self.is_started = False
        self.ending: Mapping[str, Any] | None = None
        self.failure: Refused | None = None
        self.detached_timer: asyncio.TimerHandle | None = None
        self._tasks = tasks
        self._on_end = on_end
        self._process: SlotProcess | None = None
        self._master: TerminalMaster | None = None

    @property
    def is_running(self) -> bool:
        """Whether its shell has neither ended nor failed to start."""
        return self.ending is None and self.failure is None

    # The shell.

    def start_shell(self, runtime: SlotRuntime, drains: Drains) -> None:
        """Start the shell. Viewers learn whether that succeeds.

        Raises:
            OSError: the agent has no descriptors left.
        """
        process = SlotProcess(runtime, drains, (), self)
        process.start_process(shell_spec(runtime))
        self._process = process
        self._tasks.start_task(self._open(process))

    async def _open(self, process: SlotProcess) -> None:
        """Receive the terminal from the slot. If it does not come, end what was started."""
        sock = process.terminal_socket
        assert sock is not None, "a process that was started with a terminal has a socket for it"
        problem = ""
        try:
            fd = await receive_master(sock, *self.size, OPEN_WITHIN_S)
        except NoTerminal as error:
            problem = str(error)
        finally:
            sock.close()
        if problem:
            self._fail_if_running("the terminal could not be opened: %s" % problem)
            if not process.is_over:
                await process.end_tree()
            return
        if not self.is_running:  # it has been taken away meanwhile
            os.close(fd)
            return
        self._master = TerminalMaster(fd, self._receive_output)
        self._master.set_size(*self.size)  # it may have changed meanwhile
        self.is_started = True
        self._update_reading()
        self._send_news()

    def _receive_output(self, data: bytes) -> None:
        self.scrollback.append(data)
        self._update_reading()
        self._send_news()

    def _update_reading(self) -> None:
        if self._master is not None:
            self._master.set_reading(self.is_running and (self.writer is None or self.writer.unread_bytes < AHEAD_BYTES))

    def _send_news(self) -> None:
        for viewer in self.viewers:
            viewer.on_news()

    # What viewers do.

    def add_viewer(self, viewer: Viewer) -> None:
        """Add a viewer. One that may write becomes the writer, in place of the one before."""
        self.viewers.append(viewer)
        if viewer.may_write:
            self.make_writer(viewer)

    def make_writer(self, viewer: Viewer) -> None:
        """Make a viewer the writer if it may be, in place of the one before."""
        if viewer.may_write and viewer in self.viewers:
            self.writer = viewer
            self._update_reading()
            self._send_news()

    def remove_viewer(self, viewer: Viewer) -> None:
        """Forget a viewer that has left."""
        self.viewers.remove(viewer)
        if self.writer is viewer:
            self.writer = None
        self._update_reading()

    def note_progress(self) -> None:
        """Called when a viewer has been sent some output."""
        self._update_reading()

    def resize(self, viewer: Viewer, cols: int, rows: int) -> None:
        """Change the size of the window, if this viewer is the writer."""
        if self.writer is viewer and self.size != (cols, rows):
            self.size = (cols, rows)
            if self._master is not None:
                self._master.set_size(cols, rows)
            self._send_news()

    async def write(self, viewer: Viewer, data: bytes) -> None:
        """Pass keys to the program, and wait until its terminal has taken them. Those of a viewer that is not the writer are dropped."""
        if self._master is not None and self.writer is viewer and self.is_running:
            self._master.input.write_stdin(data)
            await self._master.input.wait_until_written()

    # The end.

    def end_shell(self) -> None:
        """Begin to end the shell and its descendants, in the background. Its terminal hangs up at once."""
        if self.is_running and self._process is not None:
            if self._master is not None:
                self._master.close_master()
            self._tasks.start_task(_end_tree(self._process))

    def take_away(self, failure: Refused) -> None:
        """End the terminal for its viewers, because the processes of the slot are ended. The caller ends those.

        Args:
            failure: what its viewers are told.
        """
        if self.failure is None:
            self.failure = failure
            self._finish()

    def _fail_if_running(self, detail: str) -> None:
        if self.is_running:
            self.failure = Refused("slot_unavailable", detail)
            self._finish()

    def _finish(self) -> None:
        if self._master is not None:
            self._master.close_master()
        if self._process is not None:
            self._process.release_leaf()
        if self.detached_timer is not None:
            self.detached_timer.cancel()
            self.detached_timer = None
        self._on_end(self)
        self._send_news()

    def on_still_running(self) -> None:
        """See `ProcessListener`. A terminal has no deadlines."""

    def on_output(self) -> None:
        """See `ProcessListener`. This object reads the output itself."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `ProcessListener`. The shell has ended, and with it the terminal."""
        if not self.is_running:
            return
        if self._master is None:
            self._fail_if_running("the terminal could not be opened: its process has ended with status %d" % status)
            return
        self._master.read_rest(_REST_BYTES)
        exit_code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self.ending = {"type": "exit", "exit_code": exit_code}
        self._finish()

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `ProcessListener`."""
        self._fail_if_running("the terminal could not be opened (%s): %s" % (step, os.strerror(errno)))

    def on_init_lost(self, detail: str) -> None:
        """See `ProcessListener`."""
        self._fail_if_running("the slot's init has ended: %s" % detail)


async def _end_tree(process: SlotProcess) -> None:
    await process.end_tree()

"""The terminals of one lease."""

from __future__ import annotations

import asyncio
import secrets

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.execution.terminals.terminal import Terminal
from sandbox_server.agent.execution.terminals.viewer import Viewer

MAX_TERMINALS = 16
MAX_VIEWERS = 16
#: A terminal whose name was generated ends so long after its last viewer has left.
DETACHED_S = 300.0


class Terminals:
    """The terminals of one lease, by name.

    A terminal that was opened under a name lives until its shell ends, or until the processes of the slot are ended. One with a generated name also ends when
    it has had no viewer for `DETACHED_S`. A terminal whose shell has ended while nobody looked is kept for the next viewer, so that it learns the exit code.

    Args:
        drains: reads the pipes that outlive a process.
        tasks: runs background tasks.
    """

    def __init__(self, drains: Drains, tasks: BackgroundTasks) -> None:
        self._drains = drains
        self._tasks = tasks
        self._terminals: dict[str, Terminal] = {}
        self._generated_names: set[str] = set()
        self._last_written = ""

    def count_running(self) -> int:
        """How many shells run."""
        return sum(terminal.is_running for terminal in self._terminals.values())

    def open_terminal(self, runtime: SlotRuntime, name: str | None, size: tuple[int, int]) -> tuple[Terminal, bool]:
        """Return the terminal with this name, a new one if there is none, and whether it is new.

        Args:
            runtime: the slot runtime in which a new shell runs.
            name: the name; None for a new terminal with a generated one.
            size: the columns and rows of the window of a new terminal.

        Raises:
            Refused: the lease has as many terminals as it may have, or the agent has no descriptors left.
        """
        terminal = self._terminals.get(name) if name is not None else None
        is_new = terminal is None
        if terminal is None:
            self._make_room()
            terminal = Terminal(name or "t-" + secrets.token_hex(6), size, self._tasks, self._forget_if_failed)
            try:
                terminal.start_shell(runtime, self._drains)
            except OSError as error:
                raise Refused("slot_unavailable", "the terminal could not be opened: %s" % error.strerror) from None
            self._terminals[terminal.name] = terminal
            if name is None:
                self._generated_names.add(terminal.name)
        self._last_written = terminal.name
        return terminal, is_new

    def find_terminal(self, name: str | None) -> Terminal:
        """Return the terminal with this name; without a name, the one that was last opened for writing.

        Raises:
            Refused: there is none.
        """
        terminal = self._terminals.get(self._last_written if name is None else name)
        if terminal is not None:
            return terminal
        running = ", ".join(sorted(self._terminals)) or "none"
        raise Refused("invalid", "the lease has no terminal%s to watch; those it has: %s" % ("" if name is None else " " + ascii(name), running))

    def add_viewer(self, terminal: Terminal, viewer: Viewer) -> None:
        """Let a viewer see a terminal.

        Raises:
            Refused: the terminal has as many viewers as it may have.
        """
        if len(terminal.viewers) >= MAX_VIEWERS:
            raise Refused("limit_reached", "the terminal %s has %d viewers: at most so many are allowed" % (ascii(terminal.name), MAX_VIEWERS))
        if terminal.detached_timer is not None:
            terminal.detached_timer.cancel()
            terminal.detached_timer = None
        terminal.add_viewer(viewer)

    def remove_viewer(self, terminal: Terminal, viewer: Viewer, has_seen_end: bool) -> None:
        """Note that a viewer has left, and whether it was told before that the shell had ended."""
        terminal.remove_viewer(viewer)
        if has_seen_end:
            self._forget(terminal)
        elif not terminal.viewers and terminal.is_running and terminal.name in self._generated_names:
            terminal.detached_timer = asyncio.get_event_loop().call_later(DETACHED_S, terminal.end_shell)

    def take_away_terminals(self, failure: Refused) -> None:
        """End all terminals for their viewers. The processes of the slot are ended by the caller.

        Args:
            failure: what the viewers are told.
        """
        for terminal in list(self._terminals.values()):
            terminal.take_away(failure)
        self._terminals.clear()

    def _make_room(self) -> None:
        """Check that another terminal may be opened. If too many that have ended are kept, forget the oldest of them.

        Raises:
            Refused: as many are running as may be.
        """
        if self.count_running() >= MAX_TERMINALS:
            raise Refused("limit_reached", "the lease has %d terminals: at most so many are allowed; end one of them" % MAX_TERMINALS)
        ended = [terminal for terminal in self._terminals.values() if not terminal.is_running]
        if len(ended) >= MAX_TERMINALS:
            self._forget(ended[0])

    def _forget_if_failed(self, terminal: Terminal) -> None:
        if terminal.failure is not None:
            self._forget(terminal)

    def _forget(self, terminal: Terminal) -> None:
        if self._terminals.get(terminal.name) is terminal:
            del self._terminals[terminal.name]
        self._generated_names.discard(terminal.name)

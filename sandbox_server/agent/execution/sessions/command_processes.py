"""Finds the processes that the running command of a session has started, and sends them signals.

They are not all processes of the session: the shell itself, and the background processes that earlier commands have left, stay.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Dict, Mapping

from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.init import process_table
from sandbox_server.agent.kernel.leaf_groups import Leaf

_TICKS = os.sysconf("SC_CLK_TCK")
_CLOCK_BOOTTIME = 7  # The clock of the start times in /proc/PID/stat.
_START = 19  # The position of the start time after the process name in /proc/PID/stat.


class CommandProcesses:
    """The processes of one command. The object is made before the command begins.

    Args:
        runtime: the slot runtime of the session.
        leaf: the control group of the session, if it has one. Without one, a process that has left the session of its shell and lost its parent is not found.
        shell: the process id of the shell as the agent sees it, and its start time.
    """

    def __init__(self, runtime: SlotRuntime, leaf: Leaf | None, shell: tuple[int, int]) -> None:
        self._runtime = runtime
        self._leaf = leaf
        self._shell_pid, self._shell_start = shell
        self._began_ticks = int(time.clock_gettime(_CLOCK_BOOTTIME) * _TICKS)
        self._earlier: Mapping[int, int] = self._find_earlier()

    def _find_earlier(self) -> Mapping[int, int]:
        """The processes that earlier commands have left, with their start times. Mostly there is none, and this costs one read."""
        if self._leaf is not None:
            pids = [pid for pid in self._leaf.pids() if pid not in (self._shell_pid, self._runtime.init_pid)]
        else:
            pids = _read_children(self._shell_pid)
        starts = ((pid, read_start(pid)) for pid in pids)
        return {pid: start for pid, start in starts if start is not None}

    def find_living(self) -> tuple[process_table.Members, process_table.Members]:
        """Return the shell, and the living processes of the command, each with its start time. It reads all of /proc, so it may take some milliseconds."""
        table = process_table.read_process_table()
        shell = process_table.select_living(table, [self._shell_pid])
        if shell.get(self._shell_pid) != self._shell_start:
            return {}, {}  # the shell has ended
        pids = set(self._leaf.pids()) if self._leaf is not None else process_table.find_trees(table, [self._shell_pid])
        pids -= {self._shell_pid, self._runtime.init_pid}
        left = [pid for pid, start in self._earlier.items() if pid in table and table[pid][2] == start]
        left += [pid for pid in pids if pid in table and table[pid][2] < self._began_ticks]
        pids -= process_table.find_trees(table, left)
        return shell, process_table.select_living(table, pids - self._find_file_operations(table, pids))

    def _find_file_operations(self, table: process_table.ProcessTable, pids: set[int]) -> set[int]:
        """Those of the processes that init has forked for a file operation. They are in the control group in which init is."""
        init_pid = self._runtime.init_pid
        children = [pid for pid in pids if pid in table and table[pid][0] == init_pid]
        if not children:
            return set()
        init_command_line = _read_command_line(init_pid)
        return {pid for pid in children if _read_command_line(pid) == init_command_line}

    def send_signal(self, which: int, already: Dict[int, int]) -> tuple[int, int]:
        """Send a signal to the shell if that is due, and to the processes of the command.

        A shell abandons its command only if it has the signal itself when all its children end because of it. So every process has SIGINT pending before any
        of them goes on. The shell of the session gets the signal again once none of the processes is left that have got it, because then it goes on with its
        command.

        Args:
            which: the signal for the processes of the command: SIGINT, which each of them gets once, or SIGKILL.
            already: the processes that have got a signal, with their start times. This method adds to it.

        Returns:
            How many processes of the command, and how many shells, lived when the signal was sent.
        """
        shell, members = self.find_living()
        fresh = {pid: start for pid, start in members.items() if already.get(pid) != start}
        is_kill = which == signal.SIGKILL
        if len(fresh) > 1 and not is_kill:
            process_table.send_signal(fresh, signal.SIGSTOP)
        if fresh or not members or is_kill:
            process_table.send_signal(shell, signal.SIGINT)
        process_table.send_signal(members if is_kill else fresh, which)
        if not is_kill:
            process_table.send_signal(fresh, signal.SIGCONT)
        already.update(fresh)
        return len(members), len(shell)

    def kill_living(self) -> int:
        """Send SIGKILL to the processes of the command, but not to the shell. Returns how many there were."""
        _, members = self.find_living()
        process_table.send_signal(members, signal.SIGKILL)
        return len(members)


def read_start(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since boot; None if it has ended."""
    try:
        with open("/proc/%d/stat" % pid, "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[_START])
    except (OSError, IndexError):
        return None


def _read_children(pid: int) -> list[int]:
    """Return the children of a process; none where the kernel does not list them."""
    try:
        with open("/proc/%d/task/%d/children" % (pid, pid), "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return []


def _read_command_line(pid: int) -> bytes:
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            return file.read()
    except OSError:
        return b""

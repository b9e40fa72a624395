"""Keeps track of the process trees that init has started, and signals or kills them where no control group can do it.

A tree is killed in rounds: its processes are stopped, the process table is read again, and everything found is killed, until nothing is left.
"""

from __future__ import annotations

import os
import time

from sandbox_server.agent.init import privileges, process_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import Any, Callable, Dict, List, Mapping, Set, Tuple
else:
    import _signal as signal  # `signal` would import `enum`, for which every slot would need memory

_KILL_WITHIN_S = 0.5
_HELPER_WITHIN_S = 0.5
_HELPER_POLL_S = 0.0002
_NOT_SENT = -1
_MAX_SESSIONS = 20_000
_MAX_PERIODS = 1000
_TICKS = os.sysconf("SC_CLK_TCK")
_CLOCK_BOOTTIME = 7  # The clock of the start times in /proc/PID/stat.


def _read_number(path: str) -> int:
    with open(path, "rb") as file:
        return int(file.read())


_PID_MAX = _read_number("/proc/sys/kernel/pid_max")


class SpawnedTree:
    """The processes that descend from one process that the agent has requested.

    Args:
        pid: the first process of the tree.
        started: when it was started, in clock ticks since boot.
        outlives_calls: whether it is the shell of a session or of a terminal, or a tmux server: calls begin and end while it runs.
    """

    __slots__ = ("ended", "is_being_ended", "members", "outlives_calls", "pid", "started", "used_us")

    def __init__(self, pid: int, started: int, outlives_calls: bool) -> None:
        self.pid = pid
        self.started = started
        self.outlives_calls = outlives_calls
        self.ended = False
        self.is_being_ended = False  # The agent is ending the tree and still asks about it.
        self.members: Set[int] = set()  # Other processes of the tree that were found and have not been reaped.
        self.used_us = 0  # The processor time of the reaped processes of the tree.

    def precedes(self, pid: int, start: int) -> bool:
        """Return whether this tree was started before another process.

        Start times have a resolution of one clock tick (10 ms). Within one tick the pids decide: the kernel assigns them in ascending order and wraps around.

        Args:
            pid: the other process.
            start: when it was started, in clock ticks since boot.
        """
        return start > self.started or (start == self.started and 0 < (pid - self.pid) % _PID_MAX < _PID_MAX // 2)


class SpawnedTrees:
    """The process trees of one init.

    Args:
        config: the configuration of init.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._privileged = config["mode"] == "uid"
        self._self = os.getpid()
        self._trees: Dict[int, SpawnedTree] = {}
        self._pids: Dict[int, int] = {}
        self._ended_sessions: Set[int] = set()
        self._call_periods: List[Tuple[int, int]] = []  # When the calls ran that have ended while a tree that outlives calls lived, in clock ticks since boot.

    def add_tree(self, number: int, pid: int, started: int, outlives_calls: bool = False) -> None:
        """Add a tree.

        Args:
            number: the number by which the agent refers to the tree.
            pid: its first process.
            started: when that process was started, in clock ticks since boot.
            outlives_calls: see `SpawnedTree`.
        """
        self._trees[number] = SpawnedTree(pid, started, outlives_calls)
        self._pids[pid] = number
        self._ended_sessions.discard(pid)

    def record_reaped(self, pid: int, used_us: int) -> int | None:
        """Record that a process was reaped.

        Args:
            pid: the process.
            used_us: the processor time of the process and of all descendants that it has waited for, in microseconds.

        Returns:
            The number of the tree whose first process it was; None for any other process.
        """
        number = self._pids.pop(pid, None)
        if number is None:
            for killed in self._trees.values():
                if pid in killed.members:
                    killed.members.discard(pid)
                    killed.used_us += used_us
            return None  # A process whose parent had ended before.
        tree = self._trees[number]
        tree.ended = True
        tree.used_us += used_us
        if not tree.is_being_ended:
            del self._trees[number]
        if len(self._ended_sessions) >= _MAX_SESSIONS:
            self._ended_sessions.clear()
        self._ended_sessions.add(pid)
        self._record_call_period(tree)
        return number

    def _record_call_period(self, call: SpawnedTree) -> None:
        if not any(tree.outlives_calls for tree in self._trees.values()):
            self._call_periods.clear()
        elif not call.outlives_calls:
            self._call_periods.append((call.started, int(time.clock_gettime(_CLOCK_BOOTTIME) * _TICKS)))
            if len(self._call_periods) > _MAX_PERIODS:
                (first, first_end), (second, second_end) = self._call_periods[:2]
                self._call_periods[:2] = [(min(first, second), max(first_end, second_end))]

    def _may_be_of_call(self, start: int) -> bool:
        """Whether a process that started then may have been started by a call, because one ran."""
        if any(not tree.outlives_calls and not tree.ended and tree.started <= start for tree in self._trees.values()):
            return True
        return any(began <= start <= ended for began, ended in self._call_periods)

    def used_us(self, number: int) -> int:
        """Return the processor time of the reaped processes of a tree, in microseconds."""
        tree = self._trees.get(number)
        return tree.used_us if tree is not None else 0

    def release_tree(self, number: int) -> None:
        """Forget a tree that the agent has ended, as soon as its first process is reaped."""
        tree = self._trees.get(number)
        if tree is not None:
            tree.is_being_ended = False
            if tree.ended:
                del self._trees[number]

    def signal_tree(self, number: int, which: int) -> int:
        """Send a signal to all processes of a tree.

        Args:
            number: the number of the tree.
            which: the number of the signal; 0 only counts the processes.

        Returns:
            The number of processes of the tree; with SIGKILL, the number of processes that still run. -1 if the signal could not be sent.
        """
        tree = self._trees.get(number)
        if tree is None:
            return 0
        tree.is_being_ended = True
        try:
            if which == signal.SIGKILL:
                return self._kill_tree(tree)
            members = self._find_members(tree)
            if which:
                self._send_signal(members, which)
            return len(members)
        except OSError:
            return _NOT_SENT  # A helper process could not be forked, because the slot has reached its limit of processes.

    def _find_members(self, tree: SpawnedTree) -> process_table.Members:
        table = process_table.read_process_table()
        table.pop(self._self, None)
        own = process_table.find_trees(table, [] if tree.ended else [tree.pid])
        own |= {pid for pid, entry in table.items() if entry[1] == tree.pid}
        other_leaders = [other.pid for other in self._trees.values() if other is not tree and not other.ended]
        others = process_table.find_trees(table, other_leaders)
        orphans = [
            pid
            for pid, (parent, session, start, _) in table.items()
            if parent == self._self and pid not in self._pids and session not in self._ended_sessions and pid not in others and tree.precedes(pid, start)
        ]
        if tree.outlives_calls:  # The background processes of the calls that ran meanwhile live on.
            orphans = [pid for pid in orphans if not self._may_be_of_call(table[pid][2])]
        own |= process_table.find_trees(table, orphans)
        tree.members |= own - others - {tree.pid}
        return process_table.select_living(table, own - others)

    def _kill_tree(self, tree: SpawnedTree) -> int:
        deadline = time.monotonic() + _KILL_WITHIN_S
        members = self._find_members(tree)
        for _ in range(process_table.KILL_ROUNDS):
            # Stop all processes first, so that none can fork while the others are killed.
            stopped: Set[int] = set()
            while set(members) - stopped and time.monotonic() < deadline:
                self._send_signal(members, signal.SIGSTOP)
                stopped |= set(members)
                members = self._find_members(tree)
            self._send_signal(members, signal.SIGKILL)
            members = self._find_members(tree)
            if not members or time.monotonic() > deadline:
                break
        return len(members)

    def _send_signal(self, members: process_table.Members, which: int) -> None:
        if not members:
            return
        if not self._privileged:
            process_table.send_signal(members, which)
            return
        # Signal as the user of the slot: if a pid was reused meanwhile, a process of another user cannot be hit.
        self._run_as_slot_user(lambda: process_table.send_signal(members, which))

    def _run_as_slot_user(self, action: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                privileges.assume_effective_uid(self._config["uid"], self._config["helper_uid"])
                action()
            finally:
                os._exit(0)
        deadline = time.monotonic() + _HELPER_WITHIN_S
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(_HELPER_POLL_S)

    def kill_all(self) -> None:
        """Kill all processes of the slot, because the agent has ended.

        In the mode `bwrap` nothing needs to be done: the kernel kills all processes of the pid namespace when init ends.
        """
        if self._privileged:
            # One `kill(-1)` as the user of the slot reaches all of its processes at once: the kernel blocks every fork meanwhile.
            self._run_as_slot_user(lambda: os.kill(-1, signal.SIGKILL))
        elif self._config["mode"] == "none":
            self._kill_descendants()

    def _kill_descendants(self) -> None:
        for _ in range(process_table.KILL_ROUNDS):
            table = process_table.read_process_table()
            members = process_table.select_living(table, process_table.find_trees(table, [pid for pid, entry in table.items() if entry[0] == self._self]))
            if not members:
                return
            self._send_signal(members, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return

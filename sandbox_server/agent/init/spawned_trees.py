"""Ending the tree of one run, or of all, where there is no cgroup to do it: stop, look again, kill, until nothing is left."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import os
import time

from sandbox_server.agent.init import privileges, process_table

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Mapping, Set

_ROUNDS = 40
_SLICE_S = 0.5
_HELPER_WITHIN_S = 0.5
_HELPER_POLL_S = 0.0002
_NOT_SENT = -1
_MOST_SESSIONS = 20_000


def _read_number(path: str) -> int:
    with open(path, "rb") as file:
        return int(file.read())


_PIDS = _read_number("/proc/sys/kernel/pid_max")


class ProcessTree:
    """One thing the agent asked for: its first process, and when it started."""

    __slots__ = ("ended", "held", "members", "pid", "started", "used_us")

    def __init__(self, pid: int, started: int) -> None:
        self.pid = pid
        self.started = started
        self.ended = False
        self.held = False  # the agent is killing its tree and still needs it
        self.members: Set[int] = set()  # what was found of its tree and has not been reaped
        self.used_us = 0  # the processor time of those of its tree that were reaped

    def precedes(self, pid: int, start: int) -> bool:
        """Whether this one began before another process. Starts have ticks of 10 ms; within one, the kernel counts pids up (and around)."""
        return start > self.started or (start == self.started and 0 < (pid - self.pid) % _PIDS < _PIDS // 2)


class SpawnedTrees:
    """What init runs, and how to end it.

    Args:
        config: init's.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._privileged = config["mode"] == "uid"
        self._self = os.getpid()
        self._runs: Dict[int, ProcessTree] = {}
        self._pids: Dict[int, int] = {}
        self._sessions_over: Set[int] = set()

    def began(self, number: int, pid: int, started: int) -> None:
        """A run has a first process."""
        self._runs[number] = ProcessTree(pid, started)
        self._pids[pid] = number
        self._sessions_over.discard(pid)

    def ended(self, pid: int, used_us: int) -> int | None:
        """A process was reaped, which with all that it has waited for used so much processor time; the number of the run whose first it was, if any."""
        number = self._pids.pop(pid, None)
        if number is None:
            for killed in self._runs.values():
                if pid in killed.members:
                    killed.members.discard(pid)
                    killed.used_us += used_us
            return None  # an orphan of the slot
        run = self._runs[number]
        run.ended = True
        run.used_us += used_us
        if not run.held:
            del self._runs[number]
        if len(self._sessions_over) >= _MOST_SESSIONS:
            self._sessions_over.clear()
        self._sessions_over.add(pid)
        return number

    def used_us(self, number: int) -> int:
        """The processor time of what was reaped of a run's tree, in microseconds."""
        run = self._runs.get(number)
        return run.used_us if run is not None else 0

    def release(self, number: int) -> None:
        """The agent has ended the run's tree and asks no more about it."""
        run = self._runs.get(number)
        if run is not None:
            run.held = False
            if run.ended:
                del self._runs[number]

    def signal(self, number: int, which: int) -> int:
        """Signal everything of a run (0: nothing, only look); how many processes that is, or with SIGKILL, how many are left; -1: it cannot be done."""
        run = self._runs.get(number)
        if run is None:
            return 0
        run.held = True
        try:
            if which == signal.SIGKILL:
                return self._kill(run)
            members = self._members(run)
            if which:
                self._send(members, which)
            return len(members)
        except OSError:
            return _NOT_SENT  # the slot leaves no room for one more process

    def _members(self, run: ProcessTree) -> process_table.Members:
        table = process_table.read_process_table()
        table.pop(self._self, None)
        mine = process_table.find_trees(table, [] if run.ended else [run.pid])
        mine |= {pid for pid, entry in table.items() if entry[1] == run.pid}
        leaders = [other.pid for other in self._runs.values() if other is not run and not other.ended]
        others = process_table.find_trees(table, leaders)
        orphans = [
            pid
            for pid, (parent, session, start, _) in table.items()
            if parent == self._self and pid not in self._pids and session not in self._sessions_over and pid not in others and run.precedes(pid, start)
        ]
        mine |= process_table.find_trees(table, orphans)
        run.members |= mine - others - {run.pid}
        return process_table.select_living(table, mine - others)

    def _kill(self, run: ProcessTree) -> int:
        deadline = time.monotonic() + _SLICE_S
        members = self._members(run)
        for _ in range(_ROUNDS):
            # Stopped first, so that what is being killed cannot fork ahead of the killing.
            stopped: Set[int] = set()
            while set(members) - stopped and time.monotonic() < deadline:
                self._send(members, signal.SIGSTOP)
                stopped |= set(members)
                members = self._members(run)
            self._send(members, signal.SIGKILL)
            members = self._members(run)
            if not members or time.monotonic() > deadline:
                break
        return len(members)

    def _send(self, members: process_table.Members, which: int) -> None:
        if not members:
            return
        if not self._privileged:
            process_table.send_signal(members, which)
            return
        # As the slot's user: a pid that was reused meanwhile cannot be anybody else's.
        self._as_slot(lambda: process_table.send_signal(members, which))

    def _as_slot(self, work: Callable[[], None]) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                privileges.act_as(self._config["uid"], self._config["keeper"])
                work()
            finally:
                os._exit(0)
        deadline = time.monotonic() + _HELPER_WITHIN_S
        while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(_HELPER_POLL_S)

    def end_all(self) -> None:
        """The agent is gone, so is the slot: everything of it dies with the first process of its namespace, or by its user, or by its tree."""
        if self._privileged:
            # One `kill(-1)` as the slot's user reaches all of its processes at once: the kernel holds off every fork meanwhile.
            self._as_slot(lambda: os.kill(-1, signal.SIGKILL))
        elif self._config["mode"] == "none":
            self._kill_descendants()

    def _kill_descendants(self) -> None:
        for _ in range(_ROUNDS):
            table = process_table.read_process_table()
            members = process_table.select_living(table, process_table.find_trees(table, [pid for pid, entry in table.items() if entry[0] == self._self]))
            if not members:
                return
            self._send(members, signal.SIGKILL)
            try:
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            except ChildProcessError:
                return

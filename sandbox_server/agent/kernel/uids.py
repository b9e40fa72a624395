"""User ids for slots. No two slots on this machine have the same uid, even those of different agents, and a uid is only used again after its end is proven.

Every uid of a slot has a *helper uid*, a second uid that only helper processes of the agent have. A helper with the helper uid as its real and saved uid and
with the uid of the slot as its effective uid has the file permissions of the slot, but the slot can neither signal nor trace it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections import deque
from typing import Deque, Set

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.kernel.procfs import pids_of_uid, uids_in_use

RANGE_UIDS = 1024
_SLOT_UIDS = RANGE_UIDS // 2  # The other half are their helper uids.
_RANGES = 1024
_HIGH_BASE = 1_000_000
_LOW_BASE = 20_000
_LOW_RANGES = 40
_KILL_WITHIN_S = 10.0
_KILL_PAUSE_S = 0.01
_HELPER_WITHIN_S = 2.0
_NOTES_BYTES = 64 << 10
_HELPER_POLL_S = 0.0002
LOCK_DIRS = ("/run/lock", "/var/lock", "/run")


def _highest_uid() -> int:
    """The highest user id that exists in this user namespace."""
    highest = 0
    with open("/proc/self/uid_map", encoding="ascii") as file:
        for line in file:
            inside, _, count = (int(word) for word in line.split())
            highest = max(highest, inside + count - 1)
    return highest


def find_run_folder(name: str) -> str:
    """Return a folder of this user alone that lasts until the machine is started again. It is created if it does not exist.

    Args:
        name: its name.

    Raises:
        StartFailed: no folder can be created, and none is of this user alone.
    """
    errors = []
    for parent in LOCK_DIRS:
        path = os.path.join(parent, name)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            info = os.lstat(path)
        except OSError as error:
            errors.append(str(error))
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022:
            return path
        errors.append("%s is not a folder of this user alone" % path)
    raise StartFailed("no folder %s for this user alone: %s" % (name, "; ".join(errors)))


def helper_uid_of(uid: int) -> int:
    """Return the helper uid of the uid of a slot."""
    return uid + _SLOT_UIDS


class UidRange:
    """One range of user ids that this process has locked. The lock ends with the process."""

    def __init__(self) -> None:
        self._lock_fd = -1
        self._free: Deque[int] = deque()
        self._all = range(0)
        self._recorded_uids: Set[int] = set()

    def take_uid(self) -> int:
        """Take a uid, which is also the gid, that no process has.

        Raises:
            StartFailed: all uids are in use or in quarantine, or no range could be locked.
        """
        if self._lock_fd < 0:
            self._lock_first_free_range()
        if not self._free:
            raise StartFailed("all %d user ids of this agent are in use or in quarantine" % _SLOT_UIDS)
        uid = self._free.popleft()
        if uid not in self._recorded_uids:
            self._recorded_uids.add(uid)
            os.write(self._lock_fd, b"%d\n" % uid)
        return uid

    def give_back_uid(self, uid: int) -> None:
        """Make a uid available again after its end is proven. It is used again last, so that any process that was overlooked has time to appear."""
        self._free.append(uid)

    def lock_range(self) -> range:
        """Lock a range, and kill the processes that an earlier agent has left in it.

        Returns:
            All uids of the range, including helper uids. No other agent uses them while this process runs.

        Raises:
            StartFailed: no range could be locked.
        """
        if self._lock_fd < 0:
            self._lock_first_free_range()
        return self._all

    def _lock_first_free_range(self) -> None:
        """Lock the first range that no other agent has locked, and find out which of its uids are free."""
        folder = find_run_folder("sandbox-pool-uids")
        high = _highest_uid() >= _HIGH_BASE + _RANGES * RANGE_UIDS
        base, ranges = (_HIGH_BASE, _RANGES) if high else (_LOW_BASE, _LOW_RANGES)
        for number in range(ranges):
            fd = os.open(os.path.join(folder, str(number)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            self._lock_fd = fd
            start = base + number * RANGE_UIDS
            self._all = range(start, start + RANGE_UIDS)
            slots = range(start, start + _SLOT_UIDS)
            living = uids_in_use()
            self._recorded_uids = _read_recorded_uids(fd, slots)
            for uid in slots:
                # If no agent has ever taken a uid that a process has, the uid belongs to a user of the machine.
                if (uid not in living and helper_uid_of(uid) not in living) or (uid in self._recorded_uids and not kill_uid(uid)):
                    self._free.append(uid)
            return
        raise StartFailed("all %d ranges of user ids are taken by other agents" % ranges)


def _read_recorded_uids(fd: int, slots: range) -> Set[int]:
    """Return the uids of a range that agents have taken since the machine was started. They are recorded in its lock file."""
    words = os.pread(fd, _NOTES_BYTES, 0).split()
    os.lseek(fd, 0, os.SEEK_END)
    return {int(word) for word in words if word.isdigit() and int(word) in slots}


def kill_uid(uid: int) -> list[int]:
    """Kill all processes that have the uid of a slot or its helper uid.

    A helper process with these uids sends the signals, so that no process of another user can be hit, even if pids are reused. This blocks, so call it in a
    thread.

    Returns:
        The processes that still exist.
    """
    deadline = time.monotonic() + _KILL_WITHIN_S
    while True:
        _signal_all_processes_of(uid)
        living = pids_of_uid(uid, helper_uid_of(uid))
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(_KILL_PAUSE_S)


def _signal_all_processes_of(uid: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            # With the helper uid as its real and saved uid, this process cannot be stopped by the processes that it kills. As root, `kill(-1)` would
            # reach all processes of the machine.
            os.setresuid(helper_uid_of(uid), uid, helper_uid_of(uid))
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    deadline = time.monotonic() + _HELPER_WITHIN_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)  # The child has not been reaped, so its pid cannot have been reused.
            os.waitpid(pid, 0)
            return
        time.sleep(_HELPER_POLL_S)

"""User ids for slots. No two slots on this machine have the same uid, even those of different agents, and a uid is only used again after its end is proven.

Every uid of a slot has a *holder uid*, a second uid that only helper processes of the agent have. A helper with the holder uid as its real and saved uid and
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
_SLOT_UIDS = RANGE_UIDS // 2  # The other half are their holder uids.
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


def _lock_dir() -> str:
    errors = []
    for parent in LOCK_DIRS:
        path = os.path.join(parent, "sandbox-pool-uids")
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)
            info = os.lstat(path)
        except OSError as error:
            errors.append(str(error))
            continue
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o022:
            return path
        errors.append("%s is not a folder of this user alone" % path)
    raise StartFailed("no folder for the locks of user ids: %s" % "; ".join(errors))


def holder_uid_of(uid: int) -> int:
    """Return the holder uid of the uid of a slot."""
    return uid + _SLOT_UIDS


class UidRange:
    """One locked range of user ids. The lock goes with the process."""

    def __init__(self) -> None:
        self._lock_fd = -1
        self._free: Deque[int] = deque()
        self._all = range(0)
        self._noted: Set[int] = set()

    def take(self) -> int:
        """A uid (and gid) that no process has.

        Raises:
            StartFailed: every one is in use or in doubt, or no range could be locked.
        """
        if self._lock_fd < 0:
            self._lock()
        if not self._free:
            raise StartFailed("all %d user ids of this agent are in use or in quarantine" % _SLOT_UIDS)
        uid = self._free.popleft()
        if uid not in self._noted:
            self._noted.add(uid)
            os.write(self._lock_fd, b"%d\n" % uid)
        return uid

    def give_back(self, uid: int) -> None:
        """The uid's end is proven. It is used again last, so that what was overlooked has time to show."""
        self._free.append(uid)

    def lock(self) -> range:
        """Have a range. What an agent that was killed has left running in it is killed.

        Returns:
            All its uids, the keepers' too: nobody else has any of them as long as this process lives.

        Raises:
            StartFailed: no range could be locked.
        """
        if self._lock_fd < 0:
            self._lock()
        return self._all

    def _lock(self) -> None:
        folder = _lock_dir()
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
            self._noted = _noted(fd, slots)
            for uid in slots:
                # The user of a process that no agent ever took belongs to somebody else.
                if (uid not in living and holder_uid_of(uid) not in living) or (uid in self._noted and not kill_uid(uid)):
                    self._free.append(uid)
            return
        raise StartFailed("all %d ranges of user ids are taken by other agents" % ranges)


def _noted(fd: int, slots: range) -> Set[int]:
    """What agents have taken of a range since the machine was started, from its lock file."""
    words = os.pread(fd, _NOTES_BYTES, 0).split()
    os.lseek(fd, 0, os.SEEK_END)
    return {int(word) for word in words if word.isdigit() and int(word) in slots}


def kill_uid(uid: int) -> list[int]:
    """Kill every process of a slot's user and of its keeper, as these: nobody else can be hit, whatever happens to pids. For a thread: it forks and waits.

    Returns:
        The processes that are still there.
    """
    deadline = time.monotonic() + _KILL_WITHIN_S
    while True:
        _kill_all_of(uid)
        living = pids_of_uid(uid, holder_uid_of(uid))
        if not living or time.monotonic() > deadline:
            return living
        time.sleep(_KILL_PAUSE_S)


def _kill_all_of(uid: int) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            # Really and saved the keeper, so that no process that is to be killed here can stop this one first. The signal goes to all that have
            # either uid, and never would as root.
            os.setresuid(holder_uid_of(uid), uid, holder_uid_of(uid))
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    deadline = time.monotonic() + _HELPER_WITHIN_S
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)  # it is a child that nobody has reaped: the pid is its own
            os.waitpid(pid, 0)
            return
        time.sleep(_HELPER_POLL_S)

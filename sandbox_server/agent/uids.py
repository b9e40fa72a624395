"""User ids for slots: no two slots on this machine share one, whoever started their agents, and none is used again before its end is proven."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import time
from collections import deque
from typing import Deque

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.procfs import pids_of_uid, uids_in_use

RANGE_UIDS = 1024
_RANGES = 1024
_HIGH_BASE = 1_000_000
_LOW_BASE = 20_000
_LOW_RANGES = 40
_KILL_ROUNDS = 500
_KILL_PAUSE_S = 0.01
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


class UidRange:
    """One locked range of user ids. The lock goes with the process."""

    def __init__(self) -> None:
        self._lock_fd = -1
        self._free: Deque[int] = deque()

    def take(self) -> int:
        """A uid (and gid) that no process has.

        Raises:
            StartFailed: every one is in use or in doubt, or no range could be locked.
        """
        if self._lock_fd < 0:
            self._lock()
        if not self._free:
            raise StartFailed("all %d user ids of this agent are in use or in quarantine" % RANGE_UIDS)
        return self._free.popleft()

    def give_back(self, uid: int) -> None:
        """The uid's end is proven. It is used again last, so that what was overlooked has time to show."""
        self._free.append(uid)

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
            living = uids_in_use()
            self._free.extend(uid for uid in range(start, start + RANGE_UIDS) if uid not in living)
            return
        raise StartFailed("all %d ranges of user ids are taken by other agents" % ranges)


def kill_uid(uid: int) -> list[int]:
    """Kill every process of a user, as that user: nobody else can be hit, whatever happens to pids. Runs in a thread: it forks and waits.

    Returns:
        The processes that are still there.
    """
    living: list[int] = []
    for _ in range(_KILL_ROUNDS):
        pid = os.fork()
        if pid == 0:
            try:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        living = pids_of_uid(uid)
        if not living:
            break
        time.sleep(_KILL_PAUSE_S)
    return living

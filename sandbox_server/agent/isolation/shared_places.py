"""What a user left in the places all users share: files, System V IPC, message queues. Removed by owner, never followed, counted."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Callable, Collection, Container, Iterator, Mapping

from sandbox_server.agent.isolation.sweep import BIN_PREFIX, Sweep

SHARED_PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
_IPC_RMID = 0
_IDENTS = {"shm": "shmid", "sem": "semid", "msg": "msqid"}


def remove_owned(owners: Container[int], slots: Container[int], bins: str = BIN_PREFIX, spared: Collection[str] = ()) -> Sweep:
    """Remove everything some users own in the shared places. Their processes have ended, so nothing new appears.

    Args:
        owners: the users.
        slots: see `Sweep`.
        bins: see `Sweep`; those that it left are the caller's to delete.
        spared: folders that are left alone.
    """
    sweep = Sweep(owners, slots, bins, [(info.st_dev, info.st_ino) for info in map(os.lstat, filter(os.path.isdir, spared))])
    for place in SHARED_PLACES:
        sweep.through(place)
    _remove_all_ipc(owners, sweep)
    return sweep


def list_abandoned_bins(prefix: str) -> list[str]:
    """The bins with this prefix that a process that was killed has not deleted. Only root's: the name is anybody's to use."""
    found = []
    for place in SHARED_PLACES:
        try:
            with os.scandir(place) as entries:
                found += [entry.path for entry in entries if entry.name.startswith(prefix) and entry.stat(follow_symlinks=False).st_uid == 0]
        except OSError:
            continue  # there is no such place here
    return found


def list_owned_names(uid: int) -> list[str]:
    """The names of what a user owns in the shared places; nothing is touched."""
    sweep = Sweep((uid,), (uid,), look_only=True)
    for place in SHARED_PLACES:
        sweep.through(place)
    return sweep.found


def remove_sysv_object(kind: str, number: int) -> None:
    """Remove one System V object.

    Raises:
        OSError: it cannot be.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    removers: Mapping[str, Callable[[], int]] = {
        "shm": lambda: int(libc.shmctl(number, _IPC_RMID, None)),
        "sem": lambda: int(libc.semctl(number, 0, _IPC_RMID)),
        "msg": lambda: int(libc.msgctl(number, _IPC_RMID, None)),
    }
    if removers[kind]() != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def remove_message_queue(name: str) -> None:
    """Remove a POSIX message queue, if there is one of this name."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "mq_unlink") and libc.mq_unlink(name.encode()) != 0 and ctypes.get_errno() not in (errno.ENOENT, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _remove_all_ipc(owners: Container[int], sweep: Sweep) -> None:
    for kind in _IDENTS:
        for number, _, users in _ipc(kind):
            if any(uid in owners for uid in users):
                try:
                    remove_sysv_object(kind, number)
                except OSError as error:
                    sweep.errors.append("%s %d: %s" % (kind, number, error.strerror))
                else:
                    sweep.removed += 1


def list_ipc_ids(kind: str, uid: int | None, key: int | None = None) -> list[int]:
    """The ids of the segments, semaphores or queues (`shm`, `sem`, `msg`) of a user, or with a key."""
    return [number for number, its_key, users in _ipc(kind) if its_key == key or (uid is not None and uid in users)]


def _ipc(kind: str) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Id, key, and owner and creator of every object of a kind."""
    try:
        with open("/proc/sysvipc/" + kind, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return
    header = lines[0]
    ident, owner, creator = header.index(_IDENTS[kind]), header.index("uid"), header.index("cuid")
    for row in lines[1:]:
        yield int(row[ident]), int(row[0]), (int(row[owner]), int(row[creator]))

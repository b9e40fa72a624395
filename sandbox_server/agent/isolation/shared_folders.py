"""Finds and removes what a user has left in the folders that all users share, and its System V IPC objects and message queues.

Everything is found by its owner. Symlinks are never followed.
"""

from __future__ import annotations

import ctypes
import errno
import os
from typing import Callable, Collection, Container, Iterator, Mapping

from sandbox_server.agent.isolation.sweep import TRASH_PREFIX, Sweep

SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
_IPC_RMID = 0
_IDENTS = {"shm": "shmid", "sem": "semid", "msg": "msqid"}


def remove_owned(owner_uids: Container[int], slot_uids: Container[int], trash_prefix: str = TRASH_PREFIX, excluded: Collection[str] = ()) -> Sweep:
    """Remove everything that some users own in the shared folders, and their System V IPC objects.

    Call it after the processes of the users have ended, so that nothing new appears.

    Args:
        owner_uids: the uids of the users.
        slot_uids: see `Sweep`.
        trash_prefix: see `Sweep`. The caller deletes the trash folders.
        excluded: folders that are not searched.
    """
    sweep = Sweep(owner_uids, slot_uids, trash_prefix, [(info.st_dev, info.st_ino) for info in map(os.lstat, filter(os.path.isdir, excluded))])
    for folder in SHARED_FOLDERS:
        sweep.search_folder(folder)
    _remove_all_ipc(owner_uids, sweep)
    return sweep


def list_left_trash_folders(prefix: str) -> list[str]:
    """Return the trash folders with this prefix that a killed agent has not deleted. Only folders of root count, because every user can use the name."""
    found = []
    for folder in SHARED_FOLDERS:
        try:
            with os.scandir(folder) as entries:
                found += [entry.path for entry in entries if entry.name.startswith(prefix) and entry.stat(follow_symlinks=False).st_uid == 0]
        except OSError:
            continue  # The folder does not exist on this machine.
    return found


def list_owned_names(uid: int) -> list[str]:
    """Return the names of what a user owns in the shared folders, without changing anything."""
    sweep = Sweep((uid,), (uid,), list_only=True)
    for folder in SHARED_FOLDERS:
        sweep.search_folder(folder)
    return sweep.found


def remove_sysv_object(kind: str, number: int) -> None:
    """Remove one System V IPC object.

    Args:
        kind: `shm`, `sem` or `msg`.
        number: the id of the object.

    Raises:
        OSError: the object cannot be removed.
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
    """Remove a POSIX message queue if there is one with this name.

    Raises:
        OSError: the queue cannot be removed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "mq_unlink") and libc.mq_unlink(name.encode()) != 0 and ctypes.get_errno() not in (errno.ENOENT, errno.ENOSYS):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _remove_all_ipc(owner_uids: Container[int], sweep: Sweep) -> None:
    for kind in _IDENTS:
        for number, _, users in _list_sysv_objects(kind):
            if any(uid in owner_uids for uid in users):
                try:
                    remove_sysv_object(kind, number)
                except OSError as error:
                    sweep.errors.append("%s %d: %s" % (kind, number, error.strerror))
                else:
                    sweep.removed += 1


def list_ipc_ids(kind: str, uid: int | None, key: int | None = None) -> list[int]:
    """Return the ids of the System V IPC objects of one kind (`shm`, `sem` or `msg`) that belong to a user or have a key."""
    return [number for number, its_key, users in _list_sysv_objects(kind) if its_key == key or (uid is not None and uid in users)]


def _list_sysv_objects(kind: str) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Yield the id, the key, and the owner and creator of every System V IPC object of a kind."""
    try:
        with open("/proc/sysvipc/" + kind, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return
    header = lines[0]
    ident, owner, creator = header.index(_IDENTS[kind]), header.index("uid"), header.index("cuid")
    for row in lines[1:]:
        yield int(row[ident]), int(row[0]), (int(row[owner]), int(row[creator]))

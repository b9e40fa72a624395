"""What a user left in the places all users share: files, System V IPC, message queues. Removed by owner, never followed, counted."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import stat
from typing import Callable, Iterator, Mapping

PLACES = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")
_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_ENTRIES = 2_000_000
_IPC_RMID = 0
_IDENTS = {"shm": "shmid", "sem": "semid", "msg": "msqid"}


@dataclasses.dataclass
class Removed:
    """How much was found, and what could not be removed."""

    removed: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)


def remove_owned(uid: int, places: tuple[str, ...] = PLACES) -> Removed:
    """Remove everything a user owns in the shared places. Its processes have ended, so nothing new appears."""
    result = Removed()
    for place in places:
        try:
            top = os.open(place, _DIR_FLAGS)
        except OSError:
            continue  # there is no such place here
        _sweep(place, top, uid, result)
    _remove_ipc(uid, result)
    return result


def _sweep(place: str, top: int, uid: int, result: Removed) -> None:
    """Walk without recursion: folders of others are looked into (their content may be the user's), the user's own are emptied first."""
    stack: list[tuple[int, int, str, Iterator[str], bool]] = [(top, -1, place, iter(_names(top)), False)]
    seen = 0
    while stack:
        fd, parent, name, names, own = stack[-1]
        child = next(names, None)
        if child is None:
            stack.pop()
            os.close(fd)
            if own:
                _try(result, name, functools.partial(os.rmdir, name, dir_fd=parent))
            continue
        seen += 1
        if seen > _MAX_ENTRIES:
            result.errors.append("%s holds too much to look through" % place)
            break
        _look(child, fd, uid, result, stack)
    for fd, _, _, _, _ in stack:
        os.close(fd)


def _look(child: str, fd: int, uid: int, result: Removed, stack: list[tuple[int, int, str, Iterator[str], bool]]) -> None:
    try:
        info = os.stat(child, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return
    own = info.st_uid == uid
    if not stat.S_ISDIR(info.st_mode):
        if own:
            _try(result, child, lambda: os.unlink(child, dir_fd=fd))
        return
    if not own and not info.st_mode & 0o022:
        return  # nobody else can have put anything in there
    try:
        below = os.open(child, _DIR_FLAGS, dir_fd=fd)
    except OSError as error:
        if own:
            result.errors.append("%s: %s" % (ascii(child), error.strerror))
        return
    stack.append((below, fd, child, iter(_names(below)), own))


def _names(fd: int) -> list[str]:
    with os.scandir(fd) as entries:
        return [entry.name for entry in entries]


def _try(result: Removed, name: str, work: Callable[[], None]) -> None:
    try:
        work()
        result.removed += 1
    except FileNotFoundError:
        return
    except OSError as error:
        result.errors.append("%s: %s" % (ascii(name), error.strerror))


def _remove_ipc(uid: int, result: Removed) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    removers: Mapping[str, Callable[[int], int]] = {
        "shm": lambda number: int(libc.shmctl(number, _IPC_RMID, None)),
        "sem": lambda number: int(libc.semctl(number, 0, _IPC_RMID)),
        "msg": lambda number: int(libc.msgctl(number, _IPC_RMID, None)),
    }
    for kind, remove in removers.items():
        for number in _ipc_of(kind, uid):
            if remove(number) == 0:
                result.removed += 1
            else:
                result.errors.append("%s %d: %s" % (kind, number, os.strerror(ctypes.get_errno())))


def _ipc_of(kind: str, uid: int) -> list[int]:
    """The ids of a user's segments, semaphores or queues."""
    try:
        with open("/proc/sysvipc/" + kind, encoding="ascii") as file:
            lines = [line.split() for line in file]
    except OSError:
        return []
    if not lines:
        return []
    header, rows = lines[0], lines[1:]
    ident, owner, creator = header.index(_IDENTS[kind]), header.index("uid"), header.index("cuid")
    return [int(row[ident]) for row in rows if uid in (int(row[owner]), int(row[creator]))]

"""The places all users share, made a slot's own: a mount namespace and an IPC namespace, where init may make them. Raw system calls, few imports."""

from __future__ import annotations

import ctypes
import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping

FAILED = "own places: "
_CLONE_NEWNS, _CLONE_NEWIPC = 0x00020000, 0x08000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x1000, 0x4000, 0x80000

_libc = ctypes.CDLL(None, use_errno=True)


def make_own(places: Mapping[str, str], owner: int) -> None:
    """Leave the machine's mounts and IPC for a copy of one's own, in which other folders stand in these places.

    Args:
        places: place -> the folder that is seen there; or the options of a new tmpfs, or `mqueue`. Places that are not there stay so.
        owner: of these folders. It may have put a link to somewhere else there, or a folder that is not its own.

    Raises:
        OSError: it is not allowed here; the text begins with `FAILED`. This process is then good for nothing.
    """
    _check("unshare", _libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC))
    # The machine's own changes are still to be seen here, and none of these there.
    _mount("none", "/", None, _MS_REC | _MS_SLAVE)
    for place, what in places.items():
        if not os.path.isdir(place):
            continue
        if what.startswith("/"):
            _bind(what, place, owner)
        elif what == "mqueue":
            _mount(what, place, what, _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        else:
            _mount("tmpfs", place, "tmpfs", _MS_NOSUID | _MS_NODEV, what)


def _bind(folder: str, place: str, owner: int) -> None:
    fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != owner:
            raise OSError(errno.EPERM, "%s is not the slot's" % folder)
        _mount("/proc/self/fd/%d" % fd, place, None, _MS_BIND)
    finally:
        os.close(fd)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [os.fsencode(word) if word is not None else None for word in (source, target, kind, options)]
    _check("mount on " + target, _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def _check(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s%s: %s" % (FAILED, what, os.strerror(number)))

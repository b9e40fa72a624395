"""Gives a slot its own mounts in the folders that all users share, such as /tmp, by a mount namespace and an IPC namespace.

Only an init that is permitted to create namespaces can do this. The module uses raw system calls, so that init needs few imports.
"""

from __future__ import annotations

import ctypes
import errno
import os

from sandbox_server.agent.init.c_library import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping, NoReturn

FAILURE_PREFIX = "private mounts: "
_CLONE_NEWNS, _CLONE_NEWIPC = 0x00020000, 0x08000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 0x1000, 0x4000, 0x80000


def mount_private_folders(sources: Mapping[str, str], owner_uid: int) -> None:
    """Move this process into new mount and IPC namespaces and mount other file systems on the shared folders.

    Args:
        sources: maps each shared folder to what is mounted there: an absolute path of a folder, `mqueue`, or the options of a new tmpfs. A shared folder that
            does not exist on this machine is skipped.
        owner_uid: the user that must own the mounted folders. A slot could have replaced a folder by a symlink or by a folder of another user.

    Raises:
        OSError: the kernel does not permit it; the text begins with `FAILURE_PREFIX`. The process may then be in a partial state and must end.
    """
    if libc.unshare(_CLONE_NEWNS | _CLONE_NEWIPC) != 0:
        _raise_error("unshare")
    # Later mounts of the machine appear in this namespace, but the mounts of this namespace do not appear on the machine.
    mount("none", "/", None, _MS_REC | _MS_SLAVE)
    for folder, source in sources.items():
        if not os.path.isdir(folder):
            continue
        if source.startswith("/"):
            _bind(source, folder, owner_uid)
        elif source == "mqueue":
            mount("mqueue", folder, "mqueue", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        else:
            mount("tmpfs", folder, "tmpfs", _MS_NOSUID | _MS_NODEV, source)


def _bind(source: str, target: str, owner_uid: int) -> None:
    fd = os.open(source, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(fd).st_uid != owner_uid:
            raise OSError(errno.EPERM, "%s does not belong to the user of the slot" % source)
        mount("/proc/self/fd/%d" % fd, target, None, _MS_BIND)
    finally:
        os.close(fd)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call `mount(2)`.

    Raises:
        OSError: the kernel refused; the text begins with `FAILURE_PREFIX` and names the target.
    """
    result = libc.mount(
        source.encode("utf-8", "surrogateescape"),
        target.encode("utf-8", "surrogateescape"),
        kind.encode() if kind is not None else None,
        flags,
        options.encode("utf-8", "surrogateescape") if options is not None else None,
    )
    if result != 0:
        _raise_error("mount on " + target)


def _raise_error(system_call: str) -> NoReturn:
    number = ctypes.get_errno()
    raise OSError(number, "%s%s: %s" % (FAILURE_PREFIX, system_call, os.strerror(number)))

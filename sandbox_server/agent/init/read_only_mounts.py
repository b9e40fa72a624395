"""Makes entries of the workspace read-only for a slot, by a bind mount of each entry on itself, and checks that such mounts are in force.

In the mode `uid`, init makes the mounts itself, before it drops its privileges. In the mode `bwrap`, bubblewrap has made them, and init only checks them. The
kernel refuses to rename, remove or replace a mount point, and the slot can neither mount nor unmount. The module imports little, so that init needs little
memory.
"""

from __future__ import annotations

import errno
import os

from sandbox_server.agent.init import private_mounts

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Sequence, Tuple

    Entry = Tuple[str, int, int]  # its name at the top of the workspace, its device and its inode

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 0x1000
_ENTRY_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER_FLAGS = _ENTRY_FLAGS | os.O_DIRECTORY


def mount_read_only(workspace: str, entries: Sequence[Entry]) -> None:
    """Mount each entry of the workspace on itself, read-only. This process must have a mount namespace of its own.

    The workspace is also mounted on itself, writable, so that it cannot be renamed and replaced by another one.

    Args:
        workspace: the path of the workspace.
        entries: the entries.

    Raises:
        OSError: an entry could not be mounted, or is not the one that the agent has examined. The process must then end.
    """
    _bind_on_itself(workspace, _FOLDER_FLAGS)
    for name, _, _ in entries:
        path = workspace + "/" + name
        _bind_on_itself(path, _ENTRY_FLAGS)
        noexec = os.statvfs(path).f_flag & os.ST_NOEXEC and _MS_NOEXEC  # A remount drops the flags that it does not name.
        private_mounts.mount("none", path, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV | noexec)
    check_read_only(workspace, entries)


def _bind_on_itself(path: str, flags: int) -> None:
    fd = os.open(path, flags)
    try:
        private_mounts.mount("/proc/self/fd/%d" % fd, path, None, _MS_BIND)
    finally:
        os.close(fd)


def check_read_only(workspace: str, entries: Sequence[Entry]) -> None:
    """Check that each entry is the one that the agent has examined, and that it is mounted read-only.

    Args:
        workspace: the path of the workspace.
        entries: the entries.

    Raises:
        OSError: an entry is not; the text names it. The process must then end, so that no slot runs without its mounts.
    """
    for name, device, inode in entries:
        fd = os.open(workspace + "/" + name, _ENTRY_FLAGS)
        try:
            info = os.fstat(fd)
            is_read_only = os.fstatvfs(fd).f_flag & os.ST_RDONLY
        finally:
            os.close(fd)
        if (info.st_dev, info.st_ino) != (device, inode):
            raise OSError(errno.ESTALE, "the read-only entry %s of the workspace was replaced" % ascii(name))
        if not is_read_only:
            raise OSError(errno.EPERM, "the entry %s of the workspace is not mounted read-only" % ascii(name))

"""Detached mounts: a folder or a file as a mount that is attached nowhere yet, and that a descriptor refers to. Needs Linux 5.12 and CAP_SYS_ADMIN.

A slot gets its own folders in this form. No process has to see the folders of all slots in order to mount those of one.
"""

from __future__ import annotations

import errno
import os
import struct

from sandbox_server.agent.init.c_library import libc
from sandbox_server.agent.template.system_calls import check

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Tuple

#: The numbers of these system calls are the same on every processor.
_OPEN_TREE, _MOUNT_SETATTR = 428, 442
_OPEN_TREE_CLONE = 1
_AT_EMPTY_PATH = 0x1000
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV = 1, 2, 4
_MS_PRIVATE = 1 << 18
_PATH_FLAGS = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC

_MOUNT_ATTRIBUTES = struct.Struct("4Q")  # What is set, what is cleared, the propagation, and a user namespace.


def open_detached_mount(path: str, read_only: bool = False, expected: Tuple[int, int] | None = None) -> int:
    """Return the descriptor of a detached mount of a folder or file, without the mounts below it. Set-user-id bits and devices have no effect in it.

    Args:
        path: the folder or file. Its last component is not followed if it is a symbolic link.
        read_only: whether nothing can be changed through the mount.
        expected: the device and the inode of a read-only entry of a workspace, as the agent has examined it; None for another folder or file.

    Raises:
        OSError: it cannot be opened or mounted, or is not the expected one.
    """
    path_fd = os.open(path, _PATH_FLAGS)
    try:
        if expected is not None:
            info = os.fstat(path_fd)
            if (info.st_dev, info.st_ino) != expected:
                raise OSError(errno.ESTALE, "the read-only entry %s of the workspace was replaced" % ascii(os.path.basename(path)))
        flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | _AT_EMPTY_PATH
        mount_fd = check("open_tree", libc.syscall(_OPEN_TREE, path_fd, b"", flags))
    finally:
        os.close(path_fd)
    try:
        attributes = _ATTR_NOSUID | _ATTR_NODEV | (_ATTR_RDONLY if read_only else 0)
        request = _MOUNT_ATTRIBUTES.pack(attributes, 0, _MS_PRIVATE, 0)
        check("mount_setattr", libc.syscall(_MOUNT_SETATTR, mount_fd, b"", _AT_EMPTY_PATH, request, len(request)))
    except OSError:
        os.close(mount_fd)
        raise
    return mount_fd

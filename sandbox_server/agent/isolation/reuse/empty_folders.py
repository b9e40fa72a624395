"""The folders of ended slot runtimes that are as empty as new ones, for the next runtimes.

Most commands leave nothing behind, and to delete two folders and create two others costs more than everything else that a reset does with files: the kernel
looks for an inode that was not deleted a short time ago, so the search takes longer the more slots are reset. A folder is kept only if nobody can tell it from
a new one, except by its inode number and the time when it was created. Everything that its owner can change is compared with what it was then.

Whoever has opened a folder can list it later, whatever its mode is. So a folder is never kept whose slot could have passed an open file to another slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import struct
from typing import NamedTuple, Tuple

from sandbox_server.agent.execution.slot_runtime import Dirs
from sandbox_server.agent.isolation import base
from sandbox_server.agent.kernel.trash import FOLDER_FLAGS

_MOST_KEPT = 16  # Those of runtimes that have ended and whose successors have not been started yet.
_LONG_BYTES = struct.calcsize("l")
_FSXATTR_BYTES = 28  # struct fsxattr: flags, extent size, number of extents, project, extent size of copies, and 8 unused bytes.


def _read_request(group: str, number: int, size_bytes: int) -> int:
    """Return the number of an ioctl request that reads so many bytes."""
    return 2 << 30 | size_bytes << 16 | ord(group) << 8 | number


#: Attributes that the owner of a folder can change: flags such as "no dump", the version that NFS uses, and the project of quotas.
_ATTRIBUTES = (
    (_read_request("f", 1, _LONG_BYTES), _LONG_BYTES),  # FS_IOC_GETFLAGS
    (_read_request("v", 1, _LONG_BYTES), _LONG_BYTES),  # FS_IOC_GETVERSION
    (_read_request("X", 31, _FSXATTR_BYTES), _FSXATTR_BYTES),  # FS_IOC_FSGETXATTR
)


class _FolderState(NamedTuple):
    """What the owner of a folder can change, other than its content and its times."""

    inode: Tuple[int, int]
    mode: int
    link_count: int
    size_bytes: int
    block_count: int
    extended: Tuple[Tuple[str, bytes], ...]
    attributes: Tuple[bytes | None, ...]


_States = Tuple[_FolderState, _FolderState]  # of the workspace and of the temporary folder


def _read_state(folder: int) -> _FolderState:
    info = os.fstat(folder)
    extended = tuple((name, os.getxattr(folder, name)) for name in sorted(os.listxattr(folder)))
    attributes = tuple(_read_attribute(folder, request, size_bytes) for request, size_bytes in _ATTRIBUTES)
    mode = stat.S_IMODE(info.st_mode)
    return _FolderState((info.st_dev, info.st_ino), mode, info.st_nlink, info.st_size, info.st_blocks, extended, attributes)


def _read_attribute(folder: int, request: int, size_bytes: int) -> bytes | None:
    try:
        return bytes(fcntl.ioctl(folder, request, bytes(size_bytes)))
    except OSError:
        return None  # This file system does not have the attribute, so nobody can set it.


def _read_state_at(path: str) -> _FolderState:
    folder = os.open(path, FOLDER_FLAGS)
    try:
        return _read_state(folder)
    finally:
        os.close(folder)


def _is_as_new(path: str, state: _FolderState) -> bool:
    try:
        folder = os.open(path, FOLDER_FLAGS)
        try:
            if _read_state(folder) != state:
                return False
            with os.scandir(folder) as entries:
                return next(entries, None) is None
        finally:
            os.close(folder)
    except OSError:
        return False  # Its owner has changed its mode, or given it more attributes than the kernel can list; or no file can be opened now.


class EmptyFolders:
    """Makes the folders of slot runtimes, and keeps those of ended runtimes that are as new."""

    def __init__(self) -> None:
        self._states: dict[str, _States] = {}  # Those of the folders of runtimes that have not ended.
        self._kept: list[tuple[Dirs, _States]] = []

    def make_folders(self, root: str, uid: int | None) -> Dirs:
        """Return empty folders for a new runtime: kept ones, or new ones.

        Args:
            root: the path of the folder that contains them; it must not exist.
            uid: the owner; None for the user of the agent.

        Raises:
            OSError: there is no room for them, for example. Nothing is left of them.
        """
        try:
            return self._reuse_folders(root, uid) if self._kept else self._make_new_folders(root, uid)
        except OSError:
            self.delete_folders(root)
            raise

    def _make_new_folders(self, root: str, uid: int | None) -> Dirs:
        dirs = base.make_dirs(root, uid)
        with contextlib.suppress(OSError):  # A file system without extended attributes, for example. Such folders are never kept.
            self._states[root] = (_read_state_at(dirs.workspace), _read_state_at(dirs.tmp))
        return dirs

    def _reuse_folders(self, root: str, uid: int | None) -> Dirs:
        kept, states = self._kept.pop()
        try:
            os.rename(kept.root, root)
        except OSError:
            self.delete_folders(kept.root)
            raise
        self._states[root] = states
        dirs = base.dirs_in(root)
        for path in (dirs.workspace, dirs.tmp):
            if uid is not None:
                os.chown(path, uid, uid, follow_symlinks=False)
            os.utime(path, follow_symlinks=False)
        return dirs

    def delete_folders(self, root: str) -> None:
        """Delete folders that no process of a slot has used. What cannot be deleted is deleted with the folder of the agent.

        Args:
            root: the path of the folder that contains them. It need not exist.
        """
        self._states.pop(root, None)
        shutil.rmtree(root, ignore_errors=True)

    def keep_folders(self, dirs: Dirs) -> bool:
        """Keep the folders of an ended runtime for another one if they are as new.

        Args:
            dirs: the folders. No process has them open, and no process of a slot ever will.

        Returns:
            Whether they are kept. If not, the caller deletes them.
        """
        states = self._states.pop(dirs.root, None)
        if states is None or len(self._kept) >= _MOST_KEPT or not all(map(_is_as_new, (dirs.workspace, dirs.tmp), states)):
            return False
        self._kept.append((dirs, states))
        return True

    def forget_folders(self, dirs: Dirs) -> None:
        """Forget what the folders of a runtime were like when they were new, because the caller deletes them. Kept folders stay kept."""
        self._states.pop(dirs.root, None)

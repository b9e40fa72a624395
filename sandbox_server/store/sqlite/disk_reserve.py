"""A file that reserves room on the disk for the state file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

#: Room for the records of a start and of some thousand releases, with SQLite's write-ahead log and its index, in bytes.
RESERVE_BYTES = 16 << 20
#: The reserve is created again once the free room is this many times its size.
FREE_BEFORE_RETAKING = 2


class DiskReserve:
    """A file of a fixed size beside the state file. It is deleted when the disk is full, and created again when there is room.

    Args:
        path: the path of the file.
        size_bytes: its size.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes

    @property
    def is_held(self) -> bool:
        """Whether the file exists in its full size."""
        try:
            return self._path.stat().st_size >= self._size_bytes
        except OSError:
            return False

    def give_up(self) -> bool:
        """Delete the file, so that the state file can use the room. Returns whether there was a file."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

    def take(self) -> bool:
        """Create the file if there is enough room. Returns whether the room is reserved now.

        Raises:
            OSError: the file could not be created for another reason than a full disk.
        """
        if self.is_held:
            return True
        if free_bytes(self._path.parent) < FREE_BEFORE_RETAKING * self._size_bytes:
            return False
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size_bytes)
        except OSError as error:
            self._path.unlink(missing_ok=True)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return False
        finally:
            os.close(descriptor)
        return True


def free_bytes(folder: Path) -> int:
    """Return how many bytes this process can still write to the file system of a folder."""
    stats = os.statvfs(folder)
    return stats.f_frsize * (stats.f_bfree if os.geteuid() == 0 else stats.f_bavail)

"""Room on the disk that nobody else can use: a file that holds its blocks until the state file needs them."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

log = logging.getLogger(__name__)

#: The records of a start and of some thousand releases, with the room that SQLite needs for its log and its index, in bytes.
RESERVE_BYTES = 16 << 20
#: The reserve is made again once this many times its size is free.
FREE_BEFORE_AGAIN = 2


class DiskReserve:
    """A file of a fixed size beside the state file. It is given up when the disk is full, and made again when there is room.

    Args:
        path: where it is.
        size_bytes: how much it keeps.
    """

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes

    @property
    def is_held(self) -> bool:
        """Whether the room is kept."""
        try:
            return self._path.stat().st_size >= self._size_bytes
        except OSError:
            return False

    def give_up(self) -> bool:
        """Let the state file have the room. Returns whether there was any."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True

    def take(self) -> bool:
        """Keep the room, if there is enough of it. Returns whether it is kept now."""
        if self.is_held:
            return True
        if free_bytes(self._path.parent) < FREE_BEFORE_AGAIN * self._size_bytes:
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
    """How much this process can still write in a folder, in bytes."""
    found = os.statvfs(folder)
    return found.f_frsize * (found.f_bfree if os.geteuid() == 0 else found.f_bavail)

"""An open file that threads read and write, and that can be closed meanwhile."""

from __future__ import annotations

import errno
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sandbox_server.store.output_files import FreeSpace

T = TypeVar("T")

SHORT_BYTES = 64 << 10
"""Work on at most so many bytes may be done in the event loop."""
REST_FACTOR = 5
"""After work in the event loop, there is none for this many times as long as it took, so that a slow disk takes little of its time."""


class ShortFileWork:
    """Says which work on files is done in the event loop: short work, while the files answer quickly.

    A change to a thread and back costs more than that work.

    Args:
        now: returns the monotonic time, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._rests_until = -math.inf

    def is_allowed(self, size_bytes: int) -> bool:
        """Whether work on so many bytes may be done in the event loop now."""
        return size_bytes <= SHORT_BYTES and self._now() >= self._rests_until

    def run(self, work: Callable[[], T]) -> T:
        """Do work in this thread, and measure it. Raises what it raises."""
        began = self._now()
        try:
            return work()
        finally:
            ended = self._now()
            self._rests_until = ended + REST_FACTOR * (ended - began)


class SharedFile:
    """An open file. It is closed when the last thread that uses it is done, so that no thread uses a descriptor that belongs to another file by then.

    Args:
        descriptor: the descriptor, which belongs to this object from now on.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._user_count = 0
        self._is_closing = False

    @contextmanager
    def descriptor(self) -> Iterator[int]:
        """Use the descriptor.

        Raises:
            OSError: the file was closed.
        """
        with self._lock:
            if self._is_closing:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            self._user_count += 1
        try:
            yield self._descriptor
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._user_count -= 1
            is_last = self._is_closing and not self._user_count
        if is_last:
            os.close(self._descriptor)

    def close(self) -> None:
        """Close the file as soon as no thread uses it. A second call does nothing."""
        with self._lock:
            is_unused = not self._is_closing and not self._user_count
            self._is_closing = True
        if is_unused:
            os.close(self._descriptor)

    def write_at(self, offset: int, content: bytes) -> int:
        """Write bytes at an offset. Returns how many: all of them.

        Raises:
            OSError: they cannot be written.
        """
        written_bytes = 0
        with self.descriptor() as descriptor:
            while written_bytes < len(content):
                written_bytes += os.pwrite(descriptor, memoryview(content)[written_bytes:], offset + written_bytes)
        return written_bytes

    def write_within_room(self, offset: int, content: bytes, leave_free: FreeSpace) -> int:
        """Write bytes as `write_at` does, if the disk has room for them.

        Args:
            offset: where in the file, in bytes.
            content: the bytes.
            leave_free: how much of the disk must be free afterwards.

        Raises:
            OSError: the disk has no room, or they cannot be written.
        """
        with self.descriptor() as descriptor:
            leave_free.check_room(os.fstatvfs(descriptor), len(content))
        return self.write_at(offset, content)

    def read_at(self, offset: int, size_bytes: int) -> bytes:
        """Read so many bytes at an offset.

        Raises:
            OSError: the file is shorter, or cannot be read.
        """
        with self.descriptor() as descriptor:
            content = os.pread(descriptor, size_bytes, offset)
        if len(content) != size_bytes:
            raise OSError(errno.EIO, "the file is shorter than expected")
        return content


def open_unnamed_file(folder: Path) -> SharedFile:
    """Create a file without a name, which is gone when it is closed. The folder is created if it does not exist.

    Raises:
        OSError: it cannot be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return SharedFile(os.dup(file.fileno()))

"""Reads the processor times of a control group. Its files stay open, because calls that follow each other use the same group."""

from __future__ import annotations

import errno
import os

from sandbox_server.agent.kernel.slot_limit_groups import find_number

_FILE_BYTES = 4096


class GroupProcessorTimes:
    """The processor times of one control group of version 2. Its files are opened when they are read for the first time.

    Args:
        folder: the folder of the group.
    """

    __slots__ = ("_folder", "_is_closed", "_used_fd", "_waited_fd")

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._used_fd = self._waited_fd = -1
        self._is_closed = False

    def _open_file(self, name: str) -> int:
        if self._is_closed:  # a file that is opened now would never be closed
            raise FileNotFoundError(errno.ENOENT, "the control group has been removed", self._folder)
        return os.open(os.path.join(self._folder, name), os.O_RDONLY | os.O_CLOEXEC)

    def read_used_s(self) -> float:
        """Return how long the processes of the group have run, in seconds.

        Raises:
            OSError: no descriptor is left for the file, or the group has been removed.
        """
        if self._used_fd < 0:
            self._used_fd = self._open_file("cpu.stat")
        return find_number(os.pread(self._used_fd, _FILE_BYTES, 0), b"usage_usec") / 1e6

    def read_waited_s(self) -> float:
        """Return how long at least one process of the group was ready to run and waited, in seconds.

        Raises:
            OSError: this kernel does not count waiting times, no descriptor is left for the file, or the group has been removed.
        """
        if self._waited_fd < 0:
            self._waited_fd = self._open_file("cpu.pressure")
        for line in os.pread(self._waited_fd, _FILE_BYTES, 0).splitlines():
            if line.startswith(b"some "):
                return int(line.rpartition(b"total=")[2]) / 1e6
        return 0.0

    def renew_files(self) -> GroupProcessorTimes:
        """Return a new object for the same group, with the files of this one, from which every later read raises an OSError."""
        renewed = GroupProcessorTimes(self._folder)
        renewed._used_fd, renewed._waited_fd = self._used_fd, self._waited_fd
        self._used_fd = self._waited_fd = -1
        self._is_closed = True
        return renewed

    def close_files(self) -> None:
        """Close the files, because the group is removed. Every later read raises an OSError."""
        self._is_closed = True
        for fd in (self._used_fd, self._waited_fd):
            if fd >= 0:
                os.close(fd)
        self._used_fd = self._waited_fd = -1

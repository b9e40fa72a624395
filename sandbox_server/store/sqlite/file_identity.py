"""Whether the state file that is open is still the one at its path: SQLite writes on to a file that was deleted, and nobody would find it again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

#: What SQLite keeps beside the state file while it is open: its log and the index of its log.
SIDE_FILES = ("-wal", "-shm")


class FileId(NamedTuple):
    """Which file it is, whatever its name."""

    device: int
    inode: int


class StateFileReplaced(Exception):
    """Another file or folder is where the state file was. Only a person can decide which one counts; the message says what to do."""


class FileWatch:
    """Remembers which files were opened. Make one when the state file and its side files are open.

    Args:
        path: the state file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._folder = identify(path.parent)
        self._file = identify(path)
        self._side = {suffix: identify(side_path(path, suffix)) for suffix in SIDE_FILES}
        self._stamp = _stamp(path)

    def note_own_write(self) -> None:
        """The state file itself, not its log, has just been written by this process."""
        self._stamp = _stamp(self._path)

    def is_in_place(self) -> bool:
        """Whether the state file and its side files are all at their paths. If not, what is open can be written there anew.

        Raises:
            StateFileReplaced: it cannot, since another file or folder is there.
        """
        folder = identify(self._path.parent)
        if folder is None or folder != self._folder:
            what = "is not there any more" if folder is None else "is another one now"
            raise StateFileReplaced(
                f"the state folder {self._path.parent} {what}, while the service runs: put the old one back, and the service goes on by itself;"
                " or stop the service and start it again, and it begins with what the folder holds then"
            )
        found = identify(self._path)
        if found is not None and found != self._file:
            raise StateFileReplaced(
                f"the state file {self._path} was replaced by another file while the service runs: move that file away, and the service writes what it"
                " holds anew; or stop the service and start it again, and it goes on with that file"
            )
        if found is not None and self._stamp != _stamp(self._path):
            raise StateFileReplaced(
                f"the state file {self._path} was overwritten by another program while the service runs: stop the service, remove {self._path.name}-wal and"
                f" {self._path.name}-shm, put a good copy in place of {self._path.name}, or remove it too, and start the service again"
            )
        return found is not None and all(self._is_side_file_in_place(suffix) for suffix in SIDE_FILES)

    def _is_side_file_in_place(self, suffix: str) -> bool:
        found = identify(side_path(self._path, suffix))
        if self._side[suffix] is None:
            self._side[suffix] = found  # SQLite makes it when it first needs it
        return found == self._side[suffix]

    def take_side_files_away(self) -> None:
        """Delete the side files that are still this service's: beside another file they would be taken for that one's, and damage it."""
        for suffix in SIDE_FILES:
            path = side_path(self._path, suffix)
            if self._side[suffix] is not None and identify(path) == self._side[suffix]:
                path.unlink(missing_ok=True)

    @property
    def is_overwritten(self) -> bool:
        """Whether the file at the path is the one that was opened, with something else in it."""
        return identify(self._path) == self._file is not None and self._stamp != _stamp(self._path)

    @property
    def is_replaced(self) -> bool:
        """Whether another file is at the path, in the same folder."""
        return identify(self._path.parent) == self._folder and identify(self._path) not in (None, self._file)


def identify(path: Path) -> FileId | None:
    """Which file is at a path; None: there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return FileId(found.st_dev, found.st_ino)


def side_path(path: Path, suffix: str) -> Path:
    """Where a side file of a state file is."""
    return path.with_name(path.name + suffix)


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes whenever somebody writes to the file: its size in bytes, and the time of the last write."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_size, found.st_mtime_ns

"""Checks that the state file that is open is still the file at its path.

SQLite continues to write to a file that was deleted. No later process could find what is written there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

#: The suffixes of the files that SQLite keeps beside the state file while it is open: the write-ahead log and its index.
SIDE_FILES = ("-wal", "-shm")


class FileId(NamedTuple):
    """Identifies a file independently of its name."""

    device: int
    inode: int


class StateFileReplaced(Exception):
    """Another file or folder is at the path of the state file. Only a person can decide which one is right; the message says what to do."""


class FileIdentityCheck:
    """Remembers which files were opened. To be created when the state file and its side files are open.

    Args:
        path: the path of the state file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Texts, because they are looked up after every commit, and a `Path` takes longer than the look.
        self._path_text, self._folder_text = str(path), str(path.parent)
        self._side_paths = {suffix: str(side_path(path, suffix)) for suffix in SIDE_FILES}
        self._folder = identify(path.parent)
        self._file = identify(path)
        self._side_files = {suffix: identify(side) for suffix, side in self._side_paths.items()}
        self._stamp = _stamp(_stat(path))
        self._seen: tuple[object, ...] = ()  # what `_look` found when everything was in place the last time

    def note_own_write(self) -> None:
        """Remember the current size and time of the state file. To be called after this process has written to the file itself, not only to its log."""
        self._stamp = _stamp(_stat(self._path))

    def is_in_place(self) -> bool:
        """Return whether the state file and its side files are all at their paths. If not, they were deleted, and can be written again.

        Raises:
            StateFileReplaced: they cannot be written again, because another file or folder is at their path.
        """
        seen = self._look()
        if seen and seen == self._seen:
            return True
        is_in_place = self._compare()
        self._seen = seen if is_in_place and seen == self._look() else ()
        return is_in_place

    def _look(self) -> tuple[object, ...]:
        """Return what identifies the folder, the state file with its stamp, and the side files; an empty tuple if one of them is missing."""
        wal, shm = SIDE_FILES
        try:
            folder, file = os.stat(self._folder_text), os.stat(self._path_text)
            log, index = os.stat(self._side_paths[wal]), os.stat(self._side_paths[shm])
        except OSError:
            return ()
        files = folder.st_dev, folder.st_ino, file.st_dev, file.st_ino, log.st_dev, log.st_ino, index.st_dev, index.st_ino
        return *files, file.st_size, file.st_mtime_ns

    def _compare(self) -> bool:
        folder = identify(self._folder_text)
        if folder is None or folder != self._folder:
            what = "does not exist any more" if folder is None else "was replaced by another folder"
            raise StateFileReplaced(
                f"the state folder {self._path.parent} {what} while the service is running: put the old one back, and the service continues by itself;"
                " or restart the service, which then starts with the content of the folder at that time"
            )
        found = _stat(self._path_text)
        file = _file_id(found)
        if file is not None and file != self._file:
            raise StateFileReplaced(
                f"the state file {self._path} was replaced by another file while the service is running: move that file away, and the service writes its"
                " state to a new file; or restart the service, which then uses that file"
            )
        if file is not None and self._stamp != _stamp(found):
            raise StateFileReplaced(
                f"the state file {self._path} was overwritten by another program while the service is running: stop the service, remove"
                f" {self._path.name}-wal and {self._path.name}-shm, put a good copy in place of {self._path.name}, or remove it too, and start the service"
                " again"
            )
        return file is not None and all(self._is_side_file_in_place(suffix) for suffix in SIDE_FILES)

    def _is_side_file_in_place(self, suffix: str) -> bool:
        current = identify(self._side_paths[suffix])
        if self._side_files[suffix] is None:
            self._side_files[suffix] = current  # SQLite creates it when it first needs it
        return current == self._side_files[suffix]

    def delete_side_files(self) -> None:
        """Delete the side files that this service opened. SQLite would apply them to another state file at the path, and damage that file."""
        for suffix in SIDE_FILES:
            path = side_path(self._path, suffix)
            if self._side_files[suffix] is not None and identify(path) == self._side_files[suffix]:
                path.unlink(missing_ok=True)

    @property
    def is_overwritten(self) -> bool:
        """Whether the file at the path is the one that was opened, but another program has written to it."""
        return identify(self._path) == self._file is not None and self._stamp != _stamp(_stat(self._path))

    @property
    def is_replaced(self) -> bool:
        """Whether the folder is the same and another file is at the path."""
        return identify(self._path.parent) == self._folder and identify(self._path) not in (None, self._file)


def identify(path: Path | str) -> FileId | None:
    """Return the identity of the file at a path; None if there is none."""
    return _file_id(_stat(path))


def side_path(path: Path, suffix: str) -> Path:
    """Return the path of a file that is beside the state file and has its name with a suffix."""
    return path.with_name(path.name + suffix)


def _stat(path: Path | str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _file_id(found: os.stat_result | None) -> FileId | None:
    return None if found is None else FileId(found.st_dev, found.st_ino)


def _stamp(found: os.stat_result | None) -> tuple[int, int] | None:
    """Return the size in bytes and the time of the last write, which change with every write; None if there is no file."""
    return None if found is None else (found.st_size, found.st_mtime_ns)

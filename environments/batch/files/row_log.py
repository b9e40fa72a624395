"""A JSON Lines file to which rows are appended. Each row is in it whole or not at all, whenever the process or the machine ends."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from environments.batch.failures import RunRefused, WriteFailed

_READ_BYTES = 1 << 16


class RowLog:
    """Appends rows to a file. A row that was appended survives the end of the process; after `sync`, it survives the end of the machine.

    Args:
        path: the file; created if it is missing. Only one process may write to it.

    Raises:
        WriteFailed: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise write_failed(path, error) from error
        self._size_bytes = os.fstat(self._fd).st_size

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row.

        Raises:
            WriteFailed: the row could not be written. The file ends with the row before it.
        """
        # A model can write halves of surrogate pairs, which UTF-8 cannot express and readers of the file refuse.
        data = (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]
        except OSError as error:
            os.ftruncate(self._fd, self._size_bytes)
            raise write_failed(self._path, error) from error
        self._size_bytes += len(data)

    def sync(self) -> None:
        """Flush the rows to the disk. Other threads may append rows at the same time.

        Raises:
            WriteFailed: the disk did not take them, or the file was deleted or replaced, so that nobody would find them.
        """
        try:
            os.fsync(self._fd)
            is_there = os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except OSError as error:
            raise write_failed(self._path, error) from error
        if not is_there:
            raise WriteFailed(f"{self._path} was replaced while the run wrote to it", "restore it; rows that are not in it run again with --resume")

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def write_failed(path: Path, error: OSError) -> WriteFailed:
    """Describe an error of the operating system for a file of the run."""
    return WriteFailed(f"{path} cannot be written: {error.strerror or error}", "make room on its disk, or correct the cause")


def repair_last_line(path: Path) -> int:
    """Repair the end of a file whose process was killed while it appended a row.

    A last row that is complete except for its newline is kept. Otherwise the incomplete row is removed.

    Returns:
        How many bytes were removed.

    Raises:
        WriteFailed: the file cannot be changed.
    """
    try:
        with path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            start = _start_of_last_line(file, end)
            if start == end:
                return 0
            file.seek(start)
            if _is_row(file.read()):
                file.seek(end)
                file.write(b"\n")
                removed_bytes = 0
            else:
                file.truncate(start)
                removed_bytes = end - start
            file.flush()
            os.fsync(file.fileno())
            return removed_bytes
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise write_failed(path, error) from error


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file; none if there is no file.

    Raises:
        RunRefused: a line is no row, so the file was changed by something else.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    row = None
                if not isinstance(row, dict):
                    raise RunRefused(f"line {number} of {path} is not a row of a run", "restore the file, or delete the line: its prompt then runs again")
                yield row
    except FileNotFoundError:
        return


def _start_of_last_line(file: Any, end: int) -> int:
    """Return where the line begins that has no newline; the end of the file if the file ends with a newline."""
    position = end
    while position:
        step = min(_READ_BYTES, position)
        file.seek(position - step)
        found = file.read(step).rfind(b"\n")
        if found >= 0:
            return int(position - step + found + 1)
        position -= step
    return 0


def _is_row(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False

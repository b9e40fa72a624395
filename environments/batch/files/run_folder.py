"""The folder of a run: its lock, its checkpoint, and the rows that were written before."""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from environments.batch.failures import RunRefused
from environments.batch.files.row_log import read_rows, repair_last_line, write_failed
from environments.batch.settings import BatchSettings, changed_settings, stored_settings

log = logging.getLogger(__name__)

#: The folder, below the current one, that holds the folders of the runs.
DATA_FOLDER = Path("data")
TRAJECTORIES, ERRORS, CHECKPOINT, STATISTICS, LOCK = "trajectories.jsonl", "errors.jsonl", "checkpoint.json", "statistics.json", "lock"
RECORDINGS = "recordings"
_FORMAT = 1
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class EarlierRows:
    """What a resumed run finds in its folder.

    Args:
        keys: the hash and the occurrence of each prompt that has a trajectory.
        removed_bytes: how many bytes of an incomplete last row were removed.
    """

    keys: frozenset[bytes] = frozenset()
    removed_bytes: int = 0

    def has(self, key: tuple[str, int]) -> bool:
        """Return whether the prompt with this key has a trajectory."""
        return _compact_key(*key) in self.keys


def _compact_key(prompt_id: str, occurrence: int) -> bytes:
    """Return the key of a prompt in few bytes, because millions of them are held."""
    return bytes.fromhex(prompt_id) + occurrence.to_bytes(4, "big")


class RunFolder:
    """The folder of a run, locked for this process.

    Args:
        path: the folder.
        lock_fd: the descriptor that holds the lock.
        run_id: the run that owns the leases at the service, the same before and after a resumption.
        is_new: whether the run begins now.
    """

    def __init__(self, path: Path, lock_fd: int, run_id: str, *, is_new: bool) -> None:
        self.path = path
        self.run_id = run_id
        self.is_new = is_new
        self._lock_fd = lock_fd

    @property
    def trajectories_path(self) -> Path:
        """The file with the trajectories."""
        return self.path / TRAJECTORIES

    @property
    def errors_path(self) -> Path:
        """The file with the prompts that failed."""
        return self.path / ERRORS

    @property
    def recordings_path(self) -> Path:
        """The folder with the recordings of terminals. It is created with the first of them."""
        return self.path / RECORDINGS

    def load_earlier_rows(self, count_row: Callable[[Mapping[str, Any]], None]) -> EarlierRows:
        """Repair the ends of the files, and read the trajectories that they hold.

        Args:
            count_row: called with each trajectory.

        Raises:
            RunRefused: a line of the trajectories is not one of a run.
            WriteFailed: a file cannot be repaired.
        """
        removed_bytes = repair_last_line(self.trajectories_path)
        repair_last_line(self.errors_path)
        keys: set[bytes] = set()
        for number, row in enumerate(read_rows(self.trajectories_path), 1):
            try:
                keys.add(_compact_key(row["prompt_id"], row["occurrence"]))
                count_row(row)
            except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                raise RunRefused(
                    f"line {number} of {self.trajectories_path} is not a trajectory of this run",
                    "restore the file, or delete the line: its prompt then runs again",
                ) from error
        return EarlierRows(frozenset(keys), removed_bytes)

    def write_checkpoint(self, settings: BatchSettings, state: str, counts: Mapping[str, int]) -> None:
        """Replace the checkpoint.

        Args:
            settings: the settings of the run.
            state: `running`, `stopped` or `finished`.
            counts: how many prompts are completed, have failed, and so on.

        Raises:
            WriteFailed: the file could not be written; the earlier checkpoint is still there.
        """
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        document = {"format": _FORMAT, "run_name": settings.run_name, "run_id": self.run_id, "state": state, "updated_at": now, **counts}
        replace_json(self.path / CHECKPOINT, {**document, "settings": stored_settings(settings)})

    def write_statistics(self, document: Mapping[str, Any]) -> None:
        """Replace the statistics.

        Raises:
            WriteFailed: the file could not be written.
        """
        replace_json(self.path / STATISTICS, document)

    def read_statistics(self) -> dict[str, Any]:
        """Return the statistics that were written last."""
        document: dict[str, Any] = json.loads((self.path / STATISTICS).read_bytes())
        return document

    def discard(self) -> None:
        """Delete the folder of a run that could not begin, so that the same command works once the cause is corrected."""
        if self.is_new and not self.trajectories_path.exists():
            with contextlib.suppress(OSError):  # what cannot be deleted is the folder of a run without rows, which --resume takes up
                for name in (CHECKPOINT, LOCK):
                    (self.path / name).unlink(missing_ok=True)
                self.path.rmdir()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock_fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_run_name(run_name: str) -> None:
    """Check that a run name is the name of one folder.

    Raises:
        RunRefused: it is not.
    """
    if not _RUN_NAME.fullmatch(run_name):
        rule = "use letters, digits, `.`, `_` and `-`, at most 100, with a letter or digit at the beginning; the run is written to data/<run_name>/"
        raise RunRefused(f"--run_name: {run_name!r} cannot be the name of a folder", rule)


def open_run_folder(settings: BatchSettings, *, resume: bool, data_folder: Path = DATA_FOLDER) -> RunFolder:
    """Create the folder of a run, or open it again, and lock it.

    Args:
        settings: the settings of the run.
        resume: whether the run may exist already.
        data_folder: the folder in which the folder of the run is.

    Raises:
        RunRefused: the run exists although it is not to be resumed, it had other settings, or another process works on it.
        WriteFailed: the folder or a file in it cannot be written.
    """
    check_run_name(settings.run_name)
    path = data_folder / settings.run_name
    try:
        data_folder.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=resume)
    except FileExistsError:
        if not path.is_dir():
            raise RunRefused(f"{path} is in the way: it is not a folder", "choose another --run_name") from None
        raise RunRefused(f"the run {path} exists already", "continue it with --resume, or choose another --run_name") from None
    except OSError as error:
        raise write_failed(path, error) from error
    _check_files(path)
    lock_fd = _lock(path)
    try:
        return _open_locked(path, lock_fd, settings)
    except BaseException:  # also Ctrl-C: the lock must not stay
        os.close(lock_fd)
        raise


def _open_locked(path: Path, lock_fd: int, settings: BatchSettings) -> RunFolder:
    checkpoint = path / CHECKPOINT
    try:
        stored = json.loads(checkpoint.read_bytes())
        if stored["format"] != _FORMAT:
            raise RunRefused(f"{checkpoint} has the format {stored['format']!r}; this version writes {_FORMAT}", "resume it with the version that began it")
        run_id, earlier = str(stored["run_id"]), dict(stored["settings"])
    except FileNotFoundError:
        # The process was killed before it wrote anything; otherwise the settings of the rows are not known.
        if (path / TRAJECTORIES).exists() and (path / TRAJECTORIES).stat().st_size:
            raise RunRefused(f"{checkpoint} is missing, so the settings of the run are not known", "restore it, or choose another --run_name") from None
        folder = RunFolder(path, lock_fd, f"batch-{settings.run_name[:40]}-{secrets.token_hex(6)}", is_new=True)
        folder.write_checkpoint(settings, "running", {})
        return folder
    except OSError as error:
        raise RunRefused(f"{checkpoint} cannot be read: {error.strerror}", "correct the cause") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunRefused(f"{checkpoint} is not the checkpoint of a run", "restore it, or choose another --run_name") from error
    changes = changed_settings(earlier, settings)
    if changes:
        raise RunRefused(
            f"the run {path} has other settings: {'; '.join(changes)}", "resume it with the settings of its beginning, or choose another --run_name"
        )
    return RunFolder(path, lock_fd, run_id, is_new=False)


def _check_files(path: Path) -> None:
    """Check that the files of a run are files: to open a named pipe would wait for ever. In the folder of another user, links are refused, too.

    Raises:
        RunRefused: one of them is not a regular file.
        WriteFailed: the folder cannot be read.
    """
    try:
        is_foreign = path.stat().st_uid != os.geteuid()
        for name in (TRAJECTORIES, ERRORS, CHECKPOINT, STATISTICS, LOCK, _temporary(path / CHECKPOINT).name, _temporary(path / STATISTICS).name):
            file = path / name
            if file.is_symlink() and is_foreign:
                raise RunRefused(f"{file} is a link in a folder of another user, and could lead to any file of yours", "choose another --run_name")
            if file.exists() and not file.is_file():
                raise RunRefused(f"{file} is not a regular file", "remove it, or choose another --run_name")
    except OSError as error:
        raise write_failed(path, error) from error
    if is_foreign:
        log.warning("the run folder %s belongs to another user (uid %d), who can change its files at any time", path, path.stat().st_uid)


def _temporary(path: Path) -> Path:
    """Return the file to which the new content of a file is written before it replaces the old one."""
    return path.with_name(f".{path.name}.new")


def _lock(path: Path) -> int:
    """Lock a run folder. The kernel releases the lock when this process ends, however it ends.

    Raises:
        RunRefused: another process holds the lock.
        WriteFailed: the file of the lock cannot be opened.
    """
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise write_failed(path / LOCK, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        os.close(fd)
        raise RunRefused(
            f"another process{f' ({holder})' if holder else ''} works on the run {path}", "wait for its end, or choose another --run_name"
        ) from None
    except OSError as error:
        os.close(fd)
        raise write_failed(path / LOCK, error) from error
    with contextlib.suppress(OSError):  # the process id is only for the message above; a full disk has no room for it
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def replace_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace a JSON file, so that a reader finds the old or the new content, whenever the machine ends.

    Raises:
        WriteFailed: the new content could not be written; the old one is still there.
    """
    temporary = _temporary(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        folder_fd = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder_fd)
        finally:
            os.close(folder_fd)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_failed(path, error) from error

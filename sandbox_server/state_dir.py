"""The service's own folder: one service at a time, the token it made for itself, and where it can be reached."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

LOCK_FILE = "lock"
TOKEN_FILE = "token"
SERVER_FILE = "server.json"
OWNER_FILE = "owner"
PID_BYTES = 20


class StateDirError(Exception):
    """The state folder cannot be used; the message is one line that says why and what to do."""


class StateDir:
    """A state folder that is this process's alone until `close`. Make one with `open`."""

    def __init__(self, path: Path, lock: int, folder: int) -> None:
        self.path = path
        self._lock = lock
        self._folder = folder
        self._url: str | None = None
        self._is_announced = False
        self._lock_trouble: str | None = None

    @classmethod
    def open(cls, path: Path) -> StateDir:
        """Make the folder if it is missing, and lock it.

        The folder itself is locked as well as the lock file in it: who deletes that file does not let a second service in.

        Raises:
            StateDirError: it cannot be made or written, or another service has it.
        """
        path = path.absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StateDirError(_cannot_be_written(path, error)) from None
        try:
            lock = _open_lock(path) if _is_locked(folder) else None
            if lock is None:
                raise StateDirError(f"state folder {path}: {_taken(path)}: stop that one, or give this one a SANDBOX_STATE_DIR of its own")
        except OSError as error:
            os.close(folder)
            raise StateDirError(_cannot_be_written(path, error)) from None
        except StateDirError:
            os.close(folder)
            raise
        return cls(path, lock, folder)

    def check_lock(self) -> str | None:
        """Make the lock file again if somebody deleted it. To be called every second.

        Returns:
            Why this service may not be the only one in the folder, and what to do; None: it is.
        """
        trouble = self._lock_again()
        if trouble is not None and trouble != self._lock_trouble:
            log.error(trouble)
        self._lock_trouble = trouble
        return trouble

    def _lock_again(self) -> str | None:
        mine = os.fstat(self._lock)
        try:
            there = os.stat(self.path / LOCK_FILE)
            if (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino):
                return None
        except FileNotFoundError:
            if not self._is_same_folder():
                return f"state folder {self.path} is not there any more, while the service runs: put it back, or stop the service and start it again"
        except OSError as error:
            return f"the lock file of state folder {self.path} cannot be looked at: {error.strerror}"
        if not self._is_same_folder():
            return f"state folder {self.path} is another one now, while the service runs: put the old one back, or stop the service and start it again"
        try:
            lock = _open_lock(self.path)
        except OSError as error:
            return f"the lock file of state folder {self.path} was deleted and cannot be made again: {error.strerror}"
        if lock is None:
            return f"state folder {self.path}: its lock file was replaced, and {_taken(self.path)}: stop one of the two"
        os.close(self._lock)
        self._lock = lock
        log.warning("the lock file of the state folder was deleted while the service runs: it has been made again", extra={"path": str(self.path)})
        return None

    def _is_same_folder(self) -> bool:
        mine = os.fstat(self._folder)
        try:
            there = os.stat(self.path)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (mine.st_dev, mine.st_ino)

    def token(self) -> str:
        """The token that this service made for itself, now or at an earlier start.

        Raises:
            StateDirError: it cannot be read or written.
        """
        path = self.token_path
        try:
            known = path.read_text(encoding="ascii").strip() if path.exists() else ""
            if known:
                return known
            token = secrets.token_urlsafe(32)
            _write(path, token + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise StateDirError(f"token file {path}: {getattr(error, 'strerror', None) or error}") from None
        return token

    @property
    def token_path(self) -> Path:
        """Where the token is."""
        return self.path / TOKEN_FILE

    def owner(self) -> str:
        """What this service's sandboxes carry on their backends: made once for each state folder.

        Raises:
            StateDirError: it cannot be read or written.
        """
        path = self.path / OWNER_FILE
        try:
            if not path.exists():
                _write(path, secrets.token_hex(6) + "\n")
            return path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StateDirError(f"owner file {path}: {getattr(error, 'strerror', None) or error}") from None

    def write_server_file(self, url: str) -> None:
        """Leave `server.json`, by which clients of this machine find the service; where the disk is full, `retry_server_file` does."""
        self._url = url
        try:
            _write(self.path / SERVER_FILE, json.dumps({"url": url, "pid": os.getpid()}) + "\n")
        except OSError as error:
            why = error.strerror
            log.warning("clients of this machine do not find the service by itself: %s cannot be written: %s; it is tried again", self.path / SERVER_FILE, why)
        else:
            self._is_announced = True

    def retry_server_file(self) -> None:
        """Leave what could not be written before. To be called every second."""
        if self._url is not None and not self._is_announced and self._is_same_folder():
            with suppress(OSError):  # said when it was first tried
                _write(self.path / SERVER_FILE, json.dumps({"url": self._url, "pid": os.getpid()}) + "\n")
                self._is_announced = True

    def remove_server_file(self) -> None:
        """Take `server.json` away."""
        self._url = None
        if self._is_announced:
            self._is_announced = False
            if self._is_same_folder():
                (self.path / SERVER_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Take `server.json` away and unlock."""
        self.remove_server_file()
        os.close(self._lock)
        os.close(self._folder)


def _cannot_be_written(path: Path, error: OSError) -> str:
    return f"state folder {path}: {error.strerror}: give a folder that can be written in SANDBOX_STATE_DIR"


def _open_lock(path: Path) -> int | None:
    """Lock the lock file of a folder, and leave this process's id in it; None: another process has it.

    Raises:
        OSError: it cannot be opened.
    """
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _is_locked(lock):
        os.close(lock)
        return None
    try:
        # Written over what is there: on a full disk there would be no room for it once it was cut off.
        os.pwrite(lock, f"{os.getpid()}\n".ljust(PID_BYTES).encode(), 0)
    except OSError as error:
        log.warning("the lock file of the state folder does not say which process holds it: %s", error.strerror, extra={"path": str(path)})
        os.ftruncate(lock, 0)
    return lock


def _is_locked(descriptor: int) -> bool:
    """Lock a file or folder for this process; whether it has it now. A file system that cannot lock folders leaves that to the lock file."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return stat.S_ISDIR(os.fstat(descriptor).st_mode)
    return True


def _taken(path: Path) -> str:
    try:
        holder = (path / LOCK_FILE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        holder = ""
    return f"another service (pid {holder or 'unknown'}) uses it"


def _write(path: Path, text: str) -> None:
    """Replace a private file in one step."""
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)

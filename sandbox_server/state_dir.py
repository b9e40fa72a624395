"""The state folder of the service: it allows one service at a time, and holds the token, the owner id and the address of the service."""

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
#: The length of the process id in the lock file, padded with spaces, in bytes.
PID_BYTES = 20


class StateDirError(Exception):
    """The state folder cannot be used. The message is one line that says why, and what to do."""


class StateDir:
    """A state folder that only this process uses until `close`. To be created with `open`."""

    def __init__(self, path: Path, lock: int, folder: int) -> None:
        self.path = path
        self._lock = lock
        self._folder = folder
        self._url: str | None = None
        self._has_server_file = False
        self._lock_problem: str | None = None

    @classmethod
    def open(cls, path: Path) -> StateDir:
        """Create the folder if it is missing, and lock it.

        Both the folder and the lock file in it are locked, so that deleting the lock file does not let a second service start.

        Raises:
            StateDirError: the folder cannot be created or written, or another service uses it.
        """
        path = path.absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StateDirError(_cannot_be_written(path, error)) from None
        try:
            lock = _open_lock(path) if _try_lock(folder) else None
            if lock is None:
                raise StateDirError(f"state folder {path}: {_describe_holder(path)}: stop that one, or give this one a SANDBOX_STATE_DIR of its own")
        except OSError as error:
            os.close(folder)
            raise StateDirError(_cannot_be_written(path, error)) from None
        except StateDirError:
            os.close(folder)
            raise
        return cls(path, lock, folder)

    def check_lock(self) -> str | None:
        """Check the lock, and create the lock file again if it was deleted. To be called every second.

        Returns:
            One sentence that says why another service may be using the folder, and what to do; None if no other service can.
        """
        problem = self._check_lock_file()
        if problem is not None and problem != self._lock_problem:
            log.error(problem)
        self._lock_problem = problem
        return problem

    def _check_lock_file(self) -> str | None:
        own = os.fstat(self._lock)
        try:
            current = os.stat(self.path / LOCK_FILE)
            if (current.st_dev, current.st_ino) == (own.st_dev, own.st_ino):
                return None
        except FileNotFoundError:
            if not self._is_same_folder():
                return f"state folder {self.path} does not exist any more while the service is running: put it back, or restart the service"
        except OSError as error:
            return f"the lock file of state folder {self.path} cannot be read: {error.strerror}"
        if not self._is_same_folder():
            return f"state folder {self.path} was replaced by another folder while the service is running: put the old one back, or restart the service"
        try:
            lock = _open_lock(self.path)
        except OSError as error:
            return f"the lock file of state folder {self.path} was deleted and cannot be created again: {error.strerror}"
        if lock is None:
            return f"state folder {self.path}: its lock file was replaced, and {_describe_holder(self.path)}: stop one of the two"
        os.close(self._lock)
        self._lock = lock
        log.warning("the lock file of the state folder was deleted while the service is running: it has been created again", extra={"path": str(self.path)})
        return None

    def _is_same_folder(self) -> bool:
        own = os.fstat(self._folder)
        try:
            current = os.stat(self.path)
        except OSError:
            return False
        return (current.st_dev, current.st_ino) == (own.st_dev, own.st_ino)

    def token(self) -> str:
        """Return the token that the service generated for itself. The first call in a new folder generates it.

        Raises:
            StateDirError: the token file cannot be read or written.
        """
        path = self.token_path
        try:
            token = path.read_text(encoding="ascii").strip() if path.exists() else ""
            if token:
                return token
            token = secrets.token_urlsafe(32)
            _replace_file(path, token + "\n")
        except (OSError, UnicodeDecodeError) as error:
            raise StateDirError(f"token file {path}: {getattr(error, 'strerror', None) or error}") from None
        return token

    @property
    def token_path(self) -> Path:
        """The path of the file that holds the token."""
        return self.path / TOKEN_FILE

    def owner(self) -> str:
        """Return the id by which backends label the sandboxes of this service. It is generated once for each state folder.

        Raises:
            StateDirError: the owner file cannot be read or written.
        """
        path = self.path / OWNER_FILE
        try:
            if not path.exists():
                _replace_file(path, secrets.token_hex(6) + "\n")
            return path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StateDirError(f"owner file {path}: {getattr(error, 'strerror', None) or error}") from None

    def write_server_file(self, url: str) -> None:
        """Write `server.json`, in which clients on this machine find the address of the service.

        An error is logged, and `retry_server_file` tries again.

        Args:
            url: the address of the service.
        """
        self._url = url
        try:
            _replace_file(self.path / SERVER_FILE, json.dumps({"url": url, "pid": os.getpid()}) + "\n")
        except OSError as error:
            file, why = self.path / SERVER_FILE, error.strerror
            log.warning("clients on this machine do not find the service by themselves: %s cannot be written: %s; the service tries again", file, why)
        else:
            self._has_server_file = True

    def retry_server_file(self) -> None:
        """Write `server.json` if it could not be written before. To be called every second."""
        if self._url is not None and not self._has_server_file and self._is_same_folder():
            with suppress(OSError):  # logged when it was tried first
                _replace_file(self.path / SERVER_FILE, json.dumps({"url": self._url, "pid": os.getpid()}) + "\n")
                self._has_server_file = True

    def remove_server_file(self) -> None:
        """Delete `server.json`."""
        self._url = None
        if self._has_server_file:
            self._has_server_file = False
            if self._is_same_folder():
                (self.path / SERVER_FILE).unlink(missing_ok=True)

    def unlock(self) -> None:
        """Unlock the folder, after deleting `server.json`."""
        self.remove_server_file()
        os.close(self._lock)
        os.close(self._folder)


def _cannot_be_written(path: Path, error: OSError) -> str:
    return f"state folder {path}: {error.strerror}: give a folder that can be written in SANDBOX_STATE_DIR"


def _open_lock(path: Path) -> int | None:
    """Lock the lock file of a folder, and write the id of this process to it.

    Returns:
        The descriptor of the lock file; None if another process holds the lock.

    Raises:
        OSError: the file cannot be opened.
    """
    lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not _try_lock(lock):
        os.close(lock)
        return None
    try:
        # The old content is overwritten and not truncated first: on a full disk, another program could take the room in between.
        os.pwrite(lock, f"{os.getpid()}\n".ljust(PID_BYTES).encode(), 0)
    except OSError as error:
        log.warning("the lock file of the state folder does not say which process holds it: %s", error.strerror, extra={"path": str(path)})
        os.ftruncate(lock, 0)
    return lock


def _try_lock(descriptor: int) -> bool:
    """Lock a file or folder. Returns whether this process holds the lock.

    Where the file system cannot lock folders, a folder counts as locked: the lock file alone then decides.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return stat.S_ISDIR(os.fstat(descriptor).st_mode)
    return True


def _describe_holder(path: Path) -> str:
    """Return a clause that names the process which holds the lock of a folder."""
    try:
        holder = (path / LOCK_FILE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        holder = ""
    return f"another service (pid {holder or 'unknown'}) uses it"


def _replace_file(path: Path, text: str) -> None:
    """Write a file that only this user can read, replacing an older one in one step."""
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)

"""The service's own folder: one service at a time, the token it made for itself, and where it can be reached."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from pathlib import Path

LOCK_FILE = "lock"
TOKEN_FILE = "token"
SERVER_FILE = "server.json"
OWNER_FILE = "owner"


class StateDirError(Exception):
    """The state folder cannot be used; the message is one line that says why and what to do."""


class StateDir:
    """A state folder that is this process's alone until `close`. Make one with `open`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._announced = False

    @classmethod
    def open(cls, path: Path) -> StateDir:
        """Make the folder if it is missing, and lock it.

        Raises:
            StateDirError: it cannot be made or written, or another service has it.
        """
        path = path.absolute()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StateDirError(f"state folder {path}: {error.strerror}: give a folder that can be written in SANDBOX_STATE_DIR") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(lock, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(lock)
            why = f"another service (pid {holder}) uses it: stop that one, or give this one a SANDBOX_STATE_DIR of its own"
            raise StateDirError(f"state folder {path}: {why}") from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        return cls(path, lock)

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
        """What this service's sandboxes carry on their backends: made once for each state folder."""
        path = self.path / OWNER_FILE
        if not path.exists():
            _write(path, secrets.token_hex(6) + "\n")
        return path.read_text(encoding="ascii").strip()

    def announce(self, url: str) -> None:
        """Leave `server.json`, by which clients of this machine find the service."""
        _write(self.path / SERVER_FILE, json.dumps({"url": url, "pid": os.getpid()}) + "\n")
        self._announced = True

    def withdraw(self) -> None:
        """Take `server.json` away."""
        if self._announced:
            self._announced = False
            (self.path / SERVER_FILE).unlink(missing_ok=True)

    def close(self) -> None:
        """Take `server.json` away and unlock."""
        self.withdraw()
        os.close(self._lock)


def _write(path: Path, text: str) -> None:
    """Replace a private file in one step."""
    partial = path.with_name(path.name + ".new")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)

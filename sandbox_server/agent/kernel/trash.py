"""Throwing folders away: renamed at once, deleted behind, whatever a slot has put into them.

The deleter never follows a symlink, never recurses (a tree can be thousands deep), opens what was made unreadable, and crosses no mount.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import queue
import stat
import sys
import threading
from typing import Callable

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 1000


def open_dir(name: str, parent: int | None) -> int:
    """Open a folder though its mode forbids it."""
    try:
        return os.open(name, _DIR_FLAGS, dir_fd=parent)
    except PermissionError:
        path_fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY, dir_fd=parent)
        try:
            os.chmod("/proc/self/fd/%d" % path_fd, 0o700)
        finally:
            os.close(path_fd)
        return os.open(name, _DIR_FLAGS, dir_fd=parent)


def _empty_but_folders(folder: int) -> list[str]:
    """Unlink everything in an open folder that is not a folder; the names of some that are."""
    folders: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if stat.S_ISDIR(entry.stat(follow_symlinks=False).st_mode):
                folders.append(entry.name)
                if len(folders) >= _BATCH:
                    break
            else:
                _unlink(entry.name, folder)
    return folders


def _unlink(name: str, folder: int) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except PermissionError:
        os.fchmod(folder, 0o700)
        os.unlink(name, dir_fd=folder)


def _rmdir(name: str, folder: int) -> None:
    try:
        os.rmdir(name, dir_fd=folder)
    except PermissionError:
        os.fchmod(folder, 0o700)
        os.rmdir(name, dir_fd=folder)


def delete_tree(path: str) -> None:
    """Delete a folder and all that is in it.

    Folders below are moved up beside their parent before they are looked into, so that neither the depth of the tree nor the number of
    open files nor the length of a path grows.

    Raises:
        OSError: something could not be deleted.
    """
    try:
        top = open_dir(path, None)
    except FileNotFoundError:
        return
    try:
        counter = itertools.count()
        while True:
            folders = _empty_but_folders(top)
            if not folders:
                break
            for name in folders:
                _flatten(name, top, counter)
    finally:
        os.close(top)
    os.rmdir(path)


def _flatten(name: str, top: int, counter: itertools.count[int]) -> None:
    """Empty one folder of `top`: files are unlinked, folders moved up into `top` under a name of our own; then remove it."""
    folder = open_dir(name, top)
    try:
        while True:
            below = _empty_but_folders(folder)
            if not below:
                break
            for child in below:
                _move_up(child, folder, top, counter)
    finally:
        os.close(folder)
    _rmdir(name, top)


def _move_up(child: str, folder: int, top: int, counter: itertools.count[int]) -> None:
    while True:
        target = ".d%d" % next(counter)
        try:
            os.rename(child, target, src_dir_fd=folder, dst_dir_fd=top)
        except PermissionError:
            # Moving a folder rewrites its "..", which needs write permission on it and on its parent.
            os.fchmod(folder, 0o700)
            os.close(open_dir(child, folder))
            path_fd = os.open(child, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY, dir_fd=folder)
            try:
                os.chmod("/proc/self/fd/%d" % path_fd, 0o700)
            finally:
                os.close(path_fd)
            os.rename(child, target, src_dir_fd=folder, dst_dir_fd=top)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # the slot had the same idea for a name
                continue
            raise
        return


class Trash:
    """A folder whose content is being deleted by one thread of its own.

    Args:
        path: made when missing. What is thrown from another file system is renamed where it is.
        on_error: called, from the thread, with the path and the error of what could not be deleted.
    """

    def __init__(self, path: str, on_error: Callable[[str, OSError], None]) -> None:
        self._path = path
        self._on_error = on_error
        self._names = itertools.count()
        self._queue: queue.Queue[str | None] = queue.Queue()
        os.makedirs(path, mode=0o700, exist_ok=True)
        for left in os.listdir(path):
            self._queue.put(os.path.join(path, left))
        self._thread = threading.Thread(target=self._run, name="trash", daemon=True)
        self._thread.start()

    def throw(self, path: str) -> None:
        """Take a folder away now and delete it soon. Missing is fine."""
        target = os.path.join(self._path, "%d-%d" % (os.getpid(), next(self._names)))
        with contextlib.suppress(FileNotFoundError):
            try:
                os.rename(path, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                target = "%s.thrown-%s" % (path, os.path.basename(target))
                os.rename(path, target)
            self._queue.put(target)

    def is_busy(self) -> bool:
        """Whether something is still being deleted."""
        return self._queue.unfinished_tasks > 0

    def close(self) -> None:
        """Let the thread end after what it has begun."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; whether it came in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            path = self._queue.get()
            if path is None:
                return
            try:
                delete_tree(path)
            except OSError as error:
                self._on_error(path, error)
            finally:
                self._queue.task_done()


if __name__ == "__main__":
    for doomed in sys.argv[1:]:
        delete_tree(doomed)

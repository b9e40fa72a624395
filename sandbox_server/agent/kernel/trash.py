"""Deletes folders that slots have filled: a folder is renamed at once and deleted in the background.

The deletion never follows a symlink and does not recurse, because a tree can be thousands of folders deep. It makes unreadable folders readable, and it never
crosses a mount point.
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
    """Open a folder. If its mode forbids that, the mode is changed first.

    Args:
        name: the name of the folder, or its path.
        parent: descriptor of the parent folder; None if `name` is a path.
    """
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
    """Delete everything in an open folder except folders. Returns the names of at most 1000 folders in it."""
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
    """Delete a folder and everything in it.

    Each subfolder is first moved up to the top folder, so that neither the number of open descriptors nor the length of a path depends on its depth.

    Raises:
        OSError: a file or folder could not be deleted.
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
    """Delete one folder in `top`. Its files are deleted, and its subfolders are moved to `top` under new names."""
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
            # Moving a folder changes its ".." entry, which needs write permission for the folder and for its parent.
            os.fchmod(folder, 0o700)
            os.close(open_dir(child, folder))
            path_fd = os.open(child, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY, dir_fd=folder)
            try:
                os.chmod("/proc/self/fd/%d" % path_fd, 0o700)
            finally:
                os.close(path_fd)
            os.rename(child, target, src_dir_fd=folder, dst_dir_fd=top)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # The slot has created a folder with this name.
                continue
            raise
        return


class Trash:
    """A folder whose contents are deleted by a background thread.

    Args:
        path: the folder, which is created if it is missing. A folder from another file system is renamed in its place instead of being moved here.
        on_error: called in the thread with the path and the error if a folder could not be deleted.
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
        """Rename a folder now and delete it in the background. A missing folder is ignored."""
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
        """Return whether a folder is still being deleted."""
        return self._queue.unfinished_tasks > 0

    def close(self) -> None:
        """Make the thread end after it has deleted all folders."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended. Returns whether it has ended within `timeout_s` seconds."""
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

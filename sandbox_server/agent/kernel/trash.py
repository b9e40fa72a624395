"""Deletes folders in the background, whatever a slot has put into them: a folder is renamed at once, and its content is deleted by a thread.

The deletion follows no symbolic links and crosses no mounts. It does not recurse, because a tree can be thousands of folders deep, and it also deletes folders
whose mode denies reading or writing.
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

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_BATCH = 1000


def open_dir(name: str, parent: int | None) -> int:
    """Open a folder; if its mode denies that, change the mode first.

    Args:
        name: the folder, relative to `parent`.
        parent: the descriptor of its parent folder; None: `name` is a path.

    Returns:
        The descriptor.

    Raises:
        OSError: there is no folder with this name, or it cannot be opened.
    """
    try:
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)
    except PermissionError:
        path_fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY, dir_fd=parent)
        try:
            os.chmod("/proc/self/fd/%d" % path_fd, 0o700)
        finally:
            os.close(path_fd)
        return os.open(name, FOLDER_FLAGS, dir_fd=parent)


def _delete_all_but_folders(folder: int) -> list[str]:
    """Delete everything in an open folder except folders. Returns the names of some of those."""
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
    """Delete a folder with everything in it. A folder that does not exist is no error.

    Each folder below is moved up beside its parent before it is entered. So the depth of the tree, the number of open files and the length of paths do not
    grow.

    Args:
        path: the folder.

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
            folders = _delete_all_but_folders(top)
            if not folders:
                break
            for name in folders:
                _flatten(name, top, counter)
    finally:
        os.close(top)
    os.rmdir(path)


def _flatten(name: str, top: int, counter: itertools.count[int]) -> None:
    """Delete one folder of `top`: delete its files, move its folders up into `top` under new names, then delete the folder itself."""
    folder = open_dir(name, top)
    try:
        while True:
            below = _delete_all_but_folders(folder)
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
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # the slot has made a folder with the same name
                continue
            raise
        return


class Trash:
    """A folder whose content one thread deletes.

    Args:
        path: the folder; it is made if it does not exist. A folder of another file system is renamed beside itself instead of being moved here.
        on_error: called in the thread with the path and the error of a folder that could not be deleted.
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

    def discard_folder(self, path: str) -> None:
        """Move a folder away now, and let the thread delete it. A folder that does not exist is no error."""
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
        """Whether something is still to be deleted."""
        return self._queue.unfinished_tasks > 0

    def end_thread(self) -> None:
        """Let the thread end once it has deleted what was discarded so far."""
        self._queue.put(None)

    def wait_for_thread(self, timeout_s: float) -> bool:
        """Wait for the end of the thread. Returns False if it has not ended after `timeout_s` seconds."""
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

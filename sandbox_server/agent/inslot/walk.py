"""Walks a tree that a slot has created. The tree may have any depth; the walk needs two descriptors and never follows a symlink."""

from __future__ import annotations

import os
import stat
from heapq import nsmallest

from sandbox_server.agent.inslot.confine import Refusal, quote_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator

    Report = Callable[[str, OSError], None]

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class WalkEntry:
    """One file or folder of a tree. `folder_fd` and `name` can be used to open it until the walk continues.

    Attributes:
        path: the path relative to the top of the walk; it may be longer than the kernel accepts.
        name: the name in its folder.
        folder_fd: descriptor of its folder.
        info: the result of lstat.
    """

    __slots__ = ("folder_fd", "info", "name", "path")

    def __init__(self, path: str, name: str, folder_fd: int, info: os.stat_result) -> None:
        self.path = path
        self.name = name
        self.folder_fd = folder_fd
        self.info = info


class _Level:
    __slots__ = ("identity", "names", "prefix")

    def __init__(self, fd: int, prefix: str, at_most: int | None) -> None:
        info = os.fstat(fd)
        self.identity = (info.st_dev, info.st_ino)
        self.prefix = prefix
        self.names = _list_names(fd, at_most)  # In reverse order: the next name is the last element.


def _list_names(fd: int, at_most: int | None) -> list[str]:
    with os.scandir(fd) as found:
        names = (entry.name for entry in found)
        if at_most is None:
            return sorted(names, reverse=True)
        return nsmallest(at_most, names)[::-1]


def walk(top_fd: int, recursive: bool, report: Report, at_most: int | None = None, avoid: frozenset[int] = frozenset()) -> Iterator[WalkEntry]:
    """Yield the entries below a folder in the order of their names, each folder before its contents.

    An entry that is deleted during the walk is left out.

    Args:
        top_fd: descriptor of the folder, open for reading; the caller closes it.
        recursive: whether the walk enters folders.
        report: called with the path and the error of each entry that cannot be read.
        at_most: the number of entries that the caller needs at most. It limits the memory that a folder with millions of names takes.
        avoid: devices whose folders are not entered.

    Raises:
        OSError: the top folder cannot be read.
        Refusal: a folder was moved during the walk.
    """
    fd = os.dup(top_fd)
    try:
        levels = [_Level(fd, "", at_most)]
        while True:
            level = levels[-1]
            if not level.names:
                levels.pop()
                if not levels:
                    return
                fd = _close_and_return(fd, _open_parent(fd, levels[-1]))
                continue
            name = level.names.pop()
            path = level.prefix + name
            info = _stat_entry(fd, name, path, report)
            if info is None:
                continue
            yield WalkEntry(path, name, fd, info)
            if recursive and stat.S_ISDIR(info.st_mode) and info.st_dev not in avoid:
                below = _open_subfolder(fd, name, path, report)
                if below is not None:
                    fd = _close_and_return(fd, below)
                    levels.append(_Level(fd, f"{path}/", at_most))
    finally:
        os.close(fd)


def _stat_entry(fd: int, name: str, path: str, report: Report) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        report(path, error)
        return None


def _close_and_return(old: int, new: int) -> int:
    os.close(old)
    return new


def _open_subfolder(fd: int, name: str, path: str, report: Report) -> int | None:
    try:
        below = os.open(name, _FOLDER_FLAGS, dir_fd=fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        report(path, error)
        return None
    try:
        os.stat("..", dir_fd=below)  # A folder that may be read but not searched cannot be left through `..`.
    except OSError as error:
        os.close(below)
        report(path, error)
        return None
    return below


def _open_parent(fd: int, level: _Level) -> int:
    above = os.open("..", _FOLDER_FLAGS, dir_fd=fd)
    info = os.fstat(above)
    if (info.st_dev, info.st_ino) != level.identity:
        os.close(above)
        raise Refusal("file_error", f"the tree was changed while it was read: {quote_path(level.prefix or 'its top')} was moved", "ESTALE")
    return above

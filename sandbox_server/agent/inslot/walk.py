"""Walking a tree that a slot made: of any depth, with two descriptors, never through a symlink."""

from __future__ import annotations

import os
import stat
from heapq import nsmallest

from sandbox_server.agent.inslot.confine import Refusal, show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Iterator

    Report = Callable[[str, OSError], None]

_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Entry:
    """One thing in a tree. `folder_fd` and `name` lead to it until the walk goes on.

    Attributes:
        path: relative to the top of the walk; may be longer than the kernel takes.
        name: its name in its folder.
        folder_fd: its folder.
        info: what lstat says.
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
        self.names = _names(fd, at_most)  # in reverse: the next one is the last


def _names(fd: int, at_most: int | None) -> list[str]:
    with os.scandir(fd) as found:
        names = (entry.name for entry in found)
        if at_most is None:
            return sorted(names, reverse=True)
        return nsmallest(at_most, names)[::-1]


def walk(top_fd: int, recursive: bool, report: Report, at_most: int | None = None, avoid: frozenset[int] = frozenset()) -> Iterator[Entry]:
    """Everything below the folder `top_fd`, folders before what is in them, names in order.

    What vanishes meanwhile is left out.

    Args:
        top_fd: the folder, open for reading; the caller closes it.
        recursive: whether to go into folders.
        report: told the path and the error of each folder that cannot be read.
        at_most: how many entries the caller wants at most; keeps a folder with millions of names small in memory.
        avoid: devices whose folders are not gone into.

    Raises:
        OSError: the top cannot be read.
        Refusal: a folder was moved away under the walk.
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
                fd = _swap(fd, _climb(fd, levels[-1]))
                continue
            name = level.names.pop()
            path = level.prefix + name
            info = _look(fd, name, path, report)
            if info is None:
                continue
            yield Entry(path, name, fd, info)
            if recursive and stat.S_ISDIR(info.st_mode) and info.st_dev not in avoid:
                below = _enter(fd, name, path, report)
                if below is not None:
                    fd = _swap(fd, below)
                    levels.append(_Level(fd, f"{path}/", at_most))
    finally:
        os.close(fd)


def _look(fd: int, name: str, path: str, report: Report) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError as error:
        report(path, error)
        return None


def _swap(old: int, new: int) -> int:
    os.close(old)
    return new


def _enter(fd: int, name: str, path: str, report: Report) -> int | None:
    try:
        below = os.open(name, _FOLDER_FLAGS, dir_fd=fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        report(path, error)
        return None
    try:
        os.stat("..", dir_fd=below)  # a folder that may be read but not searched has no way back up
    except OSError as error:
        os.close(below)
        report(path, error)
        return None
    return below


def _climb(fd: int, level: _Level) -> int:
    above = os.open("..", _FOLDER_FLAGS, dir_fd=fd)
    info = os.fstat(above)
    if (info.st_dev, info.st_ino) != level.identity:
        os.close(above)
        raise Refusal("file_error", f"the tree was changed while it was read: {show(level.prefix or 'its top')} was moved", "ESTALE")
    return above

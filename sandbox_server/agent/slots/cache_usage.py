"""Measures the size of a cache by walking its folder. The walk runs in a thread, pauses often, and stops once the quota is exceeded."""

from __future__ import annotations

import dataclasses
import os
import stat
from typing import Callable, Iterator

from sandbox_server.agent.kernel.measuring import MAX_ENTRIES, STAT_BLOCK_BYTES, pause_between_entries
from sandbox_server.agent.kernel.trash import open_dir

MAX_DEPTH = 256


@dataclasses.dataclass
class CacheUsage:
    """The result of a measurement. `excess`: which limit is exceeded, as a sentence; None: none is."""

    size_bytes: int = 0
    entries: int = 0
    excess: str | None = None


def measure_cache(path: str, quota_bytes: int, stopped: Callable[[], bool]) -> CacheUsage:
    """Add up the sizes of all files below a folder, which slots may change during the walk.

    Symbolic links are not followed. A folder whose mode denies reading is given a mode that allows it.

    Args:
        path: the folder of the cache.
        quota_bytes: the walk ends once this size is exceeded.
        stopped: returns True once the result is not needed any more, which ends the walk.

    Raises:
        OSError: the folder cannot be read.
    """
    usage = CacheUsage()
    stack: list[tuple[int, Iterator[str]]] = [_open_folder(path, None)]
    try:
        while stack and usage.excess is None and not stopped():
            fd, names = stack[-1]
            name = next(names, None)
            if name is None:
                os.close(stack.pop()[0])
                continue
            if _count_entry(name, fd, usage):
                _enter_folder(name, stack, usage)
            _check_limits(usage, quota_bytes)
            pause_between_entries(usage.entries)
    finally:
        for fd, _ in stack:
            os.close(fd)
    return usage


def _open_folder(name: str, parent: int | None) -> tuple[int, Iterator[str]]:
    fd = open_dir(name, parent)
    try:
        return fd, iter(os.listdir(fd))
    except OSError:
        os.close(fd)
        raise


def _count_entry(name: str, fd: int, usage: CacheUsage) -> bool:
    """Add one entry to `usage`. Returns True if it is a folder."""
    usage.entries += 1
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False  # removed since the folder was listed
    usage.size_bytes += info.st_blocks * STAT_BLOCK_BYTES
    return stat.S_ISDIR(info.st_mode)


def _enter_folder(name: str, stack: list[tuple[int, Iterator[str]]], usage: CacheUsage) -> None:
    if len(stack) >= MAX_DEPTH:
        usage.excess = "it is more than %d folders deep" % MAX_DEPTH
        return
    try:
        stack.append(_open_folder(name, stack[-1][0]))
    except OSError:
        return  # removed, or replaced by something else, since the folder was listed


def _check_limits(usage: CacheUsage, quota_bytes: int) -> None:
    if usage.size_bytes > quota_bytes:
        usage.excess = "it takes more than %d bytes" % quota_bytes
    elif usage.entries > MAX_ENTRIES:
        usage.excess = "it holds more than %d files" % MAX_ENTRIES

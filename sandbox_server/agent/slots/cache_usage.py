"""How much a cache takes, found by looking: in a thread of its own, at a pace that leaves the processor to others, never further than its quota."""

from __future__ import annotations

import dataclasses
import os
import stat
import time
from typing import Callable, Iterator

from sandbox_server.agent.slots.trash import open_dir

MAX_ENTRIES = 2_000_000
MAX_DEPTH = 256
_BLOCK_BYTES = 512
_BATCH = 500
_PAUSE_S = 0.005


@dataclasses.dataclass
class Usage:
    """What was found; `over` is the limit that was passed, as a sentence."""

    size_bytes: int = 0
    entries: int = 0
    over: str | None = None


def measure(path: str, quota_bytes: int, stopped: Callable[[], bool]) -> Usage:
    """Add up a tree whose owners may change it meanwhile. Symlinks are not followed; a folder closed to its owner is opened.

    Args:
        path: the tree's top.
        quota_bytes: how much it may take.
        stopped: says that nobody waits for the answer any more.

    Raises:
        OSError: the top cannot be read.
    """
    usage = Usage()
    stack: list[tuple[int, Iterator[str]]] = [_open(path, None)]
    try:
        while stack and usage.over is None and not stopped():
            fd, names = stack[-1]
            name = next(names, None)
            if name is None:
                os.close(stack.pop()[0])
                continue
            if _count(name, fd, usage):
                _descend(name, stack, usage)
            _check(usage, quota_bytes)
            if usage.entries % _BATCH == 0:
                time.sleep(_PAUSE_S)
    finally:
        for fd, _ in stack:
            os.close(fd)
    return usage


def _open(name: str, parent: int | None) -> tuple[int, Iterator[str]]:
    fd = open_dir(name, parent)
    try:
        return fd, iter(os.listdir(fd))
    except BaseException:
        os.close(fd)
        raise


def _count(name: str, fd: int, usage: Usage) -> bool:
    """Add one entry; whether it is a folder."""
    usage.entries += 1
    try:
        info = os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False  # gone since the listing
    usage.size_bytes += info.st_blocks * _BLOCK_BYTES
    return stat.S_ISDIR(info.st_mode)


def _descend(name: str, stack: list[tuple[int, Iterator[str]]], usage: Usage) -> None:
    if len(stack) >= MAX_DEPTH:
        usage.over = "it is more than %d folders deep" % MAX_DEPTH
        return
    try:
        stack.append(_open(name, stack[-1][0]))
    except OSError:
        return  # gone, or exchanged for something else, since it was seen


def _check(usage: Usage, quota_bytes: int) -> None:
    if usage.size_bytes > quota_bytes:
        usage.over = "it takes more than %d bytes" % quota_bytes
    elif usage.entries > MAX_ENTRIES:
        usage.over = "it holds more than %d files" % MAX_ENTRIES

"""What a call wrote: a bounded part in memory, the whole in a spool file, and the cut that a result carries.

However much a process writes, a sink holds at most `MEMORY_BYTES` of it, and half the result's limit where even the spool was full.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict

MEMORY_BYTES = 64 << 10
KEPT_IN_MEMORY_BYTES = 4 << 10
SMALL_TOTAL_BYTES = 4 << 20
_READ_BYTES = 256 << 10


def marker(cut_bytes: int) -> bytes:
    """The line that says how much went."""
    return b"\n[... %d bytes cut ...]\n" % cut_bytes


class Spool:
    """A slot's folder of outputs, with a budget: the oldest finished ones make room for new ones.

    Args:
        folder: of the agent's own; the slot cannot see it.
        budget_bytes: what all files together may take.
    """

    def __init__(self, folder: str, budget_bytes: int) -> None:
        self._folder = folder
        self._left = budget_bytes
        self._names = itertools.count()
        self._finished: OrderedDict[Kept, None] = OrderedDict()
        self._small: OrderedDict[Kept, None] = OrderedDict()
        self._small_bytes = 0
        os.makedirs(folder, mode=0o700, exist_ok=True)

    def create(self) -> tuple[str, int]:
        """A new, empty file: its path and a descriptor the caller closes."""
        path = os.path.join(self._folder, str(next(self._names)))
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def grant(self, wanted: int) -> int:
        """How many of so many more bytes may be written, after making room."""
        while self._left < wanted and self._finished:
            kept, _ = self._finished.popitem(last=False)
            self._left += kept.evict()
        granted = max(0, min(wanted, self._left))
        self._left -= granted
        return granted

    def finished(self, kept: Kept) -> None:
        """An output is complete and may be evicted when its turn comes."""
        if kept.path is not None:
            self._finished[kept] = None
            return
        self._small[kept] = None
        self._small_bytes += len(kept.memory)
        while self._small_bytes > SMALL_TOTAL_BYTES:
            oldest, _ = self._small.popitem(last=False)
            self._small_bytes -= len(oldest.memory)
            self._to_file(oldest)

    def _to_file(self, kept: Kept) -> None:
        granted = self.grant(len(kept.memory))
        if granted < len(kept.memory):
            self._left += granted
            kept.evict()
            return
        path, fd = self.create()
        try:
            os.write(fd, kept.memory)
        finally:
            os.close(fd)
        kept.path, kept.on_file, kept.memory = path, granted, b""
        self._finished[kept] = None


class Kept:
    """A finished output: where it is, and how the result's part is cut from it."""

    __slots__ = ("evicted", "limit", "memory", "on_file", "path", "tail", "total")

    def __init__(self, memory: bytes, path: str | None, on_file: int, tail: bytes, total: int, limit: int) -> None:
        self.memory = memory
        self.path = path
        self.on_file = on_file
        self.tail = tail
        self.total = total
        self.limit = limit
        self.evicted = False

    def evict(self) -> int:
        """Forget the content; how many bytes of the spool that frees."""
        freed, self.on_file = self.on_file, 0
        self.memory = self.tail = b""
        self.evicted = self.total > 0
        if self.path is not None:
            os.unlink(self.path)
            self.path = None
        return freed

    @property
    def available(self) -> int:
        """How much of the whole, from its start, is still there."""
        return self.on_file if self.path is not None else len(self.memory)

    @property
    def truncated(self) -> bool:
        """Whether the result's part is less than the whole."""
        return self.total > self.limit or self.evicted

    def read(self, offset: int, size: int) -> bytes:
        """Some of the whole."""
        if self.path is None:
            return self.memory[offset : offset + size]
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_at(fd, offset, min(size, self.on_file - offset))
        finally:
            os.close(fd)

    def _span(self, start: int, end: int) -> bytes:
        """What is left of a part of the whole: some from the file, some from the tail kept beside it."""
        tail_start = self.total - len(self.tail)
        first = self.read(start, min(end, self.available) - start) if start < self.available else b""
        return first + self.tail[max(start - tail_start, 0) : max(end - tail_start, 0)]

    def cut(self) -> bytes:
        """The result's part: all of it, or the first and the last half with a line between."""
        if self.evicted:
            return marker(self.total)
        if self.total <= self.limit:
            return self._span(0, self.total)
        head = self.limit // 2
        first, last = self._span(0, head), self._span(self.total - (self.limit - head), self.total)
        return first + marker(self.total - len(first) - len(last)) + last


class Sink:
    """One output stream of a running call.

    Args:
        spool: where what does not fit into memory goes.
        limit: how many bytes the result carries at most, the cut's line aside.
    """

    __slots__ = ("_fd", "_memory", "_on_file", "_path", "_spool", "_tail", "limit", "total")

    def __init__(self, spool: Spool, limit: int) -> None:
        self._spool = spool
        self.limit = limit
        self.total = 0
        self._memory = bytearray()
        self._tail = bytearray()
        self._path: str | None = None
        self._fd = -1
        self._on_file = 0

    def write(self, data: bytes) -> None:
        """Take what a process wrote."""
        self.total += len(data)
        if self._fd < 0 and not self._tail and len(self._memory) + len(data) <= MEMORY_BYTES:
            self._memory += data
            return
        if self._fd < 0 and not self._tail:
            self._to_file()
        if not self._tail:
            data = data[self._append(data) :]
        if data:
            self._tail += data
            surplus = len(self._tail) - max(1, self.limit)
            if surplus > 0:
                del self._tail[:surplus]

    def _to_file(self) -> None:
        self._path, self._fd = self._spool.create()
        memory = bytes(self._memory)
        self._memory.clear()
        written = self._append(memory)
        self._tail += memory[written:]

    def _append(self, data: bytes) -> int:
        """Write to the spool file what it takes; how much that was."""
        granted = self._spool.grant(len(data))
        done = 0
        try:
            while done < granted:
                done += os.pwrite(self._fd, data[done:granted], self._on_file + done)
        except OSError:
            pass  # the disk is full: what is on it stays, the rest is kept as a tail, and the result says how much was cut
        self._on_file += done
        return done

    @property
    def full(self) -> bool:
        """Whether what comes is only counted any more, but for its end."""
        return bool(self._tail)

    @property
    def available(self) -> int:
        """How much of the whole, from its start, can be read."""
        return self._on_file if self._fd >= 0 else len(self._memory)

    def read(self, offset: int, size: int) -> bytes:
        """Some of what there is so far."""
        if self._fd < 0:
            return bytes(self._memory[offset : offset + size])
        return _read_at(self._fd, offset, min(size, self._on_file - offset))

    def finish(self) -> Kept:
        """Nothing more comes."""
        if self._fd < 0 and len(self._memory) > KEPT_IN_MEMORY_BYTES:
            self._to_file()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        kept = Kept(bytes(self._memory), self._path, self._on_file, bytes(self._tail), self.total, self.limit)
        self._memory.clear()
        self._tail.clear()
        self._spool.finished(kept)
        return kept


def _read_at(fd: int, offset: int, size: int) -> bytes:
    chunks = []
    while size > 0:
        chunk = os.pread(fd, min(size, _READ_BYTES), offset)
        if not chunk:
            break
        chunks.append(chunk)
        offset += len(chunk)
        size -= len(chunk)
    return b"".join(chunks)

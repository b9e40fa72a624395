"""What a call wrote: a bounded part in memory, the whole in a spool file, and the cut that a result carries.

However much a process writes, a sink holds at most `MEMORY_BYTES` of it, and what a result may carry where even the spool, or its disk, was full.
A disk that cannot take an output costs its middle, never the verdict: a slot that fills the disk must not be able to hide how its calls end.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import OrderedDict
from typing import Iterator

MEMORY_BYTES = 64 << 10
KEPT_IN_MEMORY_BYTES = 4 << 10
IN_MEMORY_TOTAL_BYTES = 4 << 20
_READ_BYTES = 256 << 10
_PIECE_BYTES = 64 << 10


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
        self._in_memory: OrderedDict[Kept, int] = OrderedDict()
        self._in_memory_bytes = 0
        self._held: dict[Kept, int] = {}

    def create(self) -> tuple[str, int]:
        """A new, empty file: its path and a descriptor the caller closes.

        Raises:
            OSError: the disk has no room for one.
        """
        os.makedirs(self._folder, mode=0o700, exist_ok=True)  # not before: a slot must be able to change hands on a full disk
        path = os.path.join(self._folder, str(next(self._names)))
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def grant(self, wanted: int) -> int:
        """How many of so many more bytes may be written, after making room."""
        while self._left < wanted and self._finished:
            kept, _ = self._finished.popitem(last=False)
            self._in_memory_bytes -= self._in_memory.pop(kept, 0)
            self._left += kept.evict()
        granted = max(0, min(wanted, self._left))
        self._left -= granted
        return granted

    def give_back(self, granted: int) -> None:
        """So many of the bytes granted were not written."""
        self._left += granted

    def hold(self, kept: Kept) -> None:
        """Do not evict this finished output before `let_go` was called as often as this: it is still to be sent."""
        self._held[kept] = self._held.get(kept, 0) + 1
        self._finished.pop(kept, None)
        self._in_memory_bytes -= self._in_memory.pop(kept, 0)

    def let_go(self, kept: Kept) -> None:
        """The other end of `hold`: the output may be evicted again, as the newest."""
        self._held[kept] -= 1
        if not self._held[kept]:
            del self._held[kept]
            self.finished(kept)

    def finished(self, kept: Kept) -> None:
        """An output is complete and may be evicted when its turn comes."""
        if kept.path is not None:
            self._finished[kept] = None
        held = len(kept.memory) + len(kept.tail)
        if held:
            self._in_memory[kept] = held
            self._in_memory_bytes += held
        # The newest stays: its result has not been told yet.
        while self._in_memory_bytes > IN_MEMORY_TOTAL_BYTES and len(self._in_memory) > 1:
            oldest, held = self._in_memory.popitem(last=False)
            self._in_memory_bytes -= held
            if not self._to_file(oldest):
                self._finished.pop(oldest, None)
                self._left += oldest.evict()

    def _to_file(self, kept: Kept) -> bool:
        """Put an output that is in memory altogether into a file; whether that could be done."""
        size = len(kept.memory)
        if kept.tail:
            return False
        granted = self.grant(size)
        try:
            if granted < size:
                raise OSError(errno.ENOSPC, "the spool has no room")
            kept.path = self._write(kept.memory)
        except OSError:
            self._left += granted
            return False
        kept.on_file, kept.memory = size, b""
        self._finished[kept] = None
        return True

    def _write(self, content: bytes) -> str:
        path, fd = self.create()
        try:
            if os.write(fd, content) < len(content):
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        return path


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

    def _span_bytes(self, start: int, end: int) -> int:
        """How many bytes `_span` gives."""
        tail_start = self.total - len(self.tail)
        return max(0, min(end, self.available) - start) + max(0, end - max(start, tail_start))

    def _spans(self) -> tuple[list[tuple[int, int]], bytes]:
        """The spans of the whole that the result's part is made of, and the line that stands after the first of them."""
        if self.evicted:
            return [], marker(self.total)
        if self.total <= self.limit:
            return [(0, self.total)], b""
        head = self.limit // 2
        spans = [(0, head), (self.total - (self.limit - head), self.total)]
        return spans, marker(self.total - sum(self._span_bytes(*span) for span in spans))

    @property
    def cut_bytes(self) -> int:
        """The size of the result's part."""
        spans, line = self._spans()
        return len(line) + sum(self._span_bytes(*span) for span in spans)

    def cut(self) -> bytes:
        """The result's part: all of it, or the first and the last half with a line between."""
        return b"".join(self.cut_pieces())

    def cut_pieces(self) -> Iterator[bytes]:
        """The result's part in pieces of at most 64 KiB, so that no more of it need be in memory at a time."""
        spans, line = self._spans()
        for start, end in spans[:1]:
            yield from self._span_pieces(start, end)
        if line:
            yield line
        for start, end in spans[1:]:
            yield from self._span_pieces(start, end)

    def _span_pieces(self, start: int, end: int) -> Iterator[bytes]:
        for at in range(start, end, _PIECE_BYTES):
            piece = self._span(at, min(at + _PIECE_BYTES, end))
            if piece:
                yield piece


class Sink:
    """One output stream of a running call.

    Args:
        spool: where what does not fit into memory goes.
        limit: how many bytes the result carries at most, the cut's line aside.
    """

    __slots__ = ("_fd", "_memory", "_no_file", "_on_file", "_path", "_spool", "_tail", "limit", "total")

    def __init__(self, spool: Spool, limit: int) -> None:
        self._spool = spool
        self.limit = limit
        self.total = 0
        self._memory = bytearray()
        self._tail = bytearray()
        self._path = ""
        self._fd = -1
        self._no_file = False  # the disk had no room for one
        self._on_file = 0

    def write(self, data: bytes) -> None:
        """Take what a process wrote."""
        self.total += len(data)
        if self._fd < 0 and not self._tail and len(self._memory) + len(data) <= MEMORY_BYTES:
            self._memory += data
            return
        if self._fd < 0 and not self._no_file:
            self._to_file()
        if self._fd >= 0 and not self._tail:
            data = data[self._append(data) :]
        if data:
            self._tail += data
            surplus = len(self._tail) - max(1, self.limit)
            if surplus > 0:
                del self._tail[:surplus]

    def _to_file(self) -> None:
        try:
            self._path, self._fd = self._spool.create()
        except OSError:
            self._no_file = True  # what is in memory stays there as the beginning, and the end is kept as a tail
            return
        memory = bytes(self._memory)
        written = self._append(memory)
        if memory and not written:
            os.close(self._fd)
            os.unlink(self._path)
            self._path, self._fd, self._no_file = "", -1, True
            return
        self._memory.clear()
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
        self._spool.give_back(granted - done)
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
        if self._fd < 0 and not self._no_file and len(self._memory) > KEPT_IN_MEMORY_BYTES:
            self._to_file()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        kept = Kept(bytes(self._memory), self._path or None, self._on_file, bytes(self._tail), self.total, self.limit)
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

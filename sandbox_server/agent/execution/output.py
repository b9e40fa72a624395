"""The output of calls: a bounded part in memory, the rest in a spool file, and the part of it that a result carries.

However much a process writes, a `Sink` holds at most `SINK_MEMORY_BYTES` of it in memory. If the spool or its disk is full, it holds in addition as much as the
result may carry. A full disk can therefore cost the middle of an output, but never the outcome of the call: a slot that fills the disk must not be able to
hide how its calls ended.
"""

from __future__ import annotations

import errno
import itertools
import os
from collections import OrderedDict
from typing import Iterator

SINK_MEMORY_BYTES = 64 << 10  # of the output of a running call
FINISHED_MEMORY_BYTES = 4 << 10  # a longer finished output is moved to a file
FINISHED_MEMORY_TOTAL_BYTES = 4 << 20  # all finished outputs of a lease that are in memory
_READ_BYTES = 256 << 10
_PIECE_BYTES = 64 << 10


def truncation_marker(omitted_bytes: int) -> bytes:
    """The line that stands in a result where so many bytes of the output were left out."""
    return b"\n[... %d bytes cut ...]\n" % omitted_bytes


class Spool:
    """The folder for the outputs of one lease. Its total size is limited: the oldest finished outputs are deleted to make room for new ones.

    Args:
        folder: a folder of the agent's own, which the slot cannot see.
        budget_bytes: how much all files in it may take together.
    """

    def __init__(self, folder: str, budget_bytes: int) -> None:
        self._folder = folder
        self._left_bytes = budget_bytes
        self._file_numbers = itertools.count()
        self._finished: OrderedDict[FinishedOutput, None] = OrderedDict()
        self._in_memory: OrderedDict[FinishedOutput, int] = OrderedDict()
        self._in_memory_bytes = 0
        self._held: dict[FinishedOutput, int] = {}

    def create_file(self) -> tuple[str, int]:
        """Make an empty file.

        Returns:
            Its path, and a descriptor that the caller closes.

        Raises:
            OSError: the disk has no room for it.
        """
        os.makedirs(self._folder, mode=0o700, exist_ok=True)  # not earlier, because a slot must be able to get its next holder even when the disk is full
        path = os.path.join(self._folder, str(next(self._file_numbers)))
        return path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def reserve_bytes(self, wanted_bytes: int) -> int:
        """Make room for so many more bytes, and reserve them. Returns how many bytes may be written, which can be fewer."""
        while self._left_bytes < wanted_bytes and self._finished:
            output, _ = self._finished.popitem(last=False)
            self._in_memory_bytes -= self._in_memory.pop(output, 0)
            self._left_bytes += output.evict()
        granted_bytes = max(0, min(wanted_bytes, self._left_bytes))
        self._left_bytes -= granted_bytes
        return granted_bytes

    def return_bytes(self, granted_bytes: int) -> None:
        """Return reserved bytes that were not written."""
        self._left_bytes += granted_bytes

    def hold_output(self, output: FinishedOutput) -> None:
        """Keep a finished output until `release_output` was called as often as this, because it is still to be sent."""
        self._held[output] = self._held.get(output, 0) + 1
        self._finished.pop(output, None)
        self._in_memory_bytes -= self._in_memory.pop(output, 0)

    def release_output(self, output: FinishedOutput) -> None:
        """Undo one `hold_output`. After the last, the output may be evicted, and counts as the newest."""
        self._held[output] -= 1
        if not self._held[output]:
            del self._held[output]
            self.add_finished(output)

    def add_finished(self, output: FinishedOutput) -> None:
        """Add an output that is complete. From now on it may be evicted to make room."""
        if output.path is not None:
            self._finished[output] = None
        held = len(output.memory) + len(output.tail)
        if held:
            self._in_memory[output] = held
            self._in_memory_bytes += held
        # The newest stays: its result has not been sent yet.
        while self._in_memory_bytes > FINISHED_MEMORY_TOTAL_BYTES and len(self._in_memory) > 1:
            oldest, held = self._in_memory.popitem(last=False)
            self._in_memory_bytes -= held
            if not self._move_to_file(oldest):
                self._finished.pop(oldest, None)
                self._left_bytes += oldest.evict()

    def _move_to_file(self, output: FinishedOutput) -> bool:
        """Move an output that is in memory as a whole to a file. Returns False if there is no room for it."""
        size = len(output.memory)
        if output.tail:
            return False
        granted_bytes = self.reserve_bytes(size)
        try:
            if granted_bytes < size:
                raise OSError(errno.ENOSPC, "the spool has no room")
            output.path = self._write_file(output.memory)
        except OSError:
            self._left_bytes += granted_bytes
            return False
        output.on_file_bytes, output.memory = size, b""
        self._finished[output] = None
        return True

    def _write_file(self, content: bytes) -> str:
        path, fd = self.create_file()
        try:
            if os.write(fd, content) < len(content):
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        return path


class FinishedOutput:
    """A finished output.

    Args:
        memory: the output, or its beginning, if that is in memory.
        path: the file that holds it otherwise.
        on_file_bytes: how many bytes of it, from its start, are in the file.
        tail: its last bytes, if the file does not hold all of it.
        total_bytes: how many bytes were written.
        limit_bytes: how many bytes the result carries at most, not counting the line that marks the cut.
    """

    __slots__ = ("is_evicted", "limit_bytes", "memory", "on_file_bytes", "path", "tail", "total_bytes")

    def __init__(self, memory: bytes, path: str | None, on_file_bytes: int, tail: bytes, total_bytes: int, limit_bytes: int) -> None:
        self.memory = memory
        self.path = path
        self.on_file_bytes = on_file_bytes
        self.tail = tail
        self.total_bytes = total_bytes
        self.limit_bytes = limit_bytes
        self.is_evicted = False

    def evict(self) -> int:
        """Delete the content. Returns how many bytes of the spool this frees."""
        freed, self.on_file_bytes = self.on_file_bytes, 0
        self.memory = self.tail = b""
        self.is_evicted = self.total_bytes > 0
        if self.path is not None:
            os.unlink(self.path)
            self.path = None
        return freed

    @property
    def available_bytes(self) -> int:
        """How many bytes of the output, from its start, can still be read."""
        return self.on_file_bytes if self.path is not None else len(self.memory)

    @property
    def is_truncated(self) -> bool:
        """Whether the result carries less than the whole output."""
        return self.total_bytes > self.limit_bytes or self.is_evicted

    def read(self, offset: int, size: int) -> bytes:
        """Return at most `size` bytes of the output from an offset on."""
        if self.path is None:
            return self.memory[offset : offset + size]
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return _read_at(fd, offset, min(size, self.on_file_bytes - offset))
        finally:
            os.close(fd)

    def _span(self, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, as far as the file and the tail still hold them."""
        tail_start = self.total_bytes - len(self.tail)
        first = self.read(start, min(end, self.available_bytes) - start) if start < self.available_bytes else b""
        return first + self.tail[max(start - tail_start, 0) : max(end - tail_start, 0)]

    def _span_bytes(self, start: int, end: int) -> int:
        """How many bytes `_span` returns."""
        tail_start = self.total_bytes - len(self.tail)
        return max(0, min(end, self.available_bytes) - start) + max(0, end - max(start, tail_start))

    def _spans(self) -> tuple[list[tuple[int, int]], bytes]:
        """The spans of the output that the result carries, and the line that stands after the first of them."""
        if self.is_evicted:
            return [], truncation_marker(self.total_bytes)
        if self.total_bytes <= self.limit_bytes:
            return [(0, self.total_bytes)], b""
        head = self.limit_bytes // 2
        spans = [(0, head), (self.total_bytes - (self.limit_bytes - head), self.total_bytes)]
        return spans, truncation_marker(self.total_bytes - sum(self._span_bytes(*span) for span in spans))

    @property
    def result_size_bytes(self) -> int:
        """How many bytes the result carries."""
        spans, line = self._spans()
        return len(line) + sum(self._span_bytes(*span) for span in spans)

    def read_for_result(self) -> bytes:
        """What the result carries: all of the output, or its beginning and its end with a line between them."""
        return b"".join(self.iter_for_result())

    def iter_for_result(self) -> Iterator[bytes]:
        """What the result carries, in pieces of at most 64 KiB, so that not all of it need be in memory at once."""
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
        spool: stores what does not fit into memory.
        limit_bytes: how many bytes the result carries at most, not counting the line that marks the cut.
    """

    __slots__ = ("_fd", "_memory", "_no_file", "_on_file_bytes", "_path", "_spool", "_tail", "limit_bytes", "total_bytes")

    def __init__(self, spool: Spool, limit_bytes: int) -> None:
        self._spool = spool
        self.limit_bytes = limit_bytes
        self.total_bytes = 0
        self._memory = bytearray()
        self._tail = bytearray()
        self._path = ""
        self._fd = -1
        self._no_file = False  # the disk had no room for a file
        self._on_file_bytes = 0

    def write(self, data: bytes) -> None:
        """Store some output."""
        self.total_bytes += len(data)
        if self._fd < 0 and not self._tail and len(self._memory) + len(data) <= SINK_MEMORY_BYTES:
            self._memory += data
            return
        if self._fd < 0 and not self._no_file:
            self._open_file()
        if self._fd >= 0 and not self._tail:
            data = data[self._append(data) :]
        if data:
            self._tail += data
            surplus = len(self._tail) - max(1, self.limit_bytes)
            if surplus > 0:
                del self._tail[:surplus]

    def _open_file(self) -> None:
        try:
            self._path, self._fd = self._spool.create_file()
        except OSError:
            self._no_file = True  # what is in memory stays there as the beginning of the output, and the end of the output is kept as a tail
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
        """Write as much to the spool file as the spool and the disk have room for. Returns how many bytes were written."""
        granted_bytes = self._spool.reserve_bytes(len(data))
        done = 0
        try:
            while done < granted_bytes:
                done += os.pwrite(self._fd, data[done:granted_bytes], self._on_file_bytes + done)
        except OSError:
            pass  # the disk is full: the file keeps what it has, the rest is kept as a tail, and the result says how much was left out
        self._spool.return_bytes(granted_bytes - done)
        self._on_file_bytes += done
        return done

    @property
    def is_full(self) -> bool:
        """Whether all that is written from now on, except for its last bytes, is only counted."""
        return bool(self._tail)

    @property
    def available_bytes(self) -> int:
        """How many bytes of the output, from its start, can be read."""
        return self._on_file_bytes if self._fd >= 0 else len(self._memory)

    def read(self, offset: int, size: int) -> bytes:
        """Return at most `size` bytes of the output so far from an offset on."""
        if self._fd < 0:
            return bytes(self._memory[offset : offset + size])
        return _read_at(self._fd, offset, min(size, self._on_file_bytes - offset))

    def finish_output(self) -> FinishedOutput:
        """End the stream. Returns the finished output."""
        if self._fd < 0 and not self._no_file and len(self._memory) > FINISHED_MEMORY_BYTES:
            self._open_file()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        output = FinishedOutput(bytes(self._memory), self._path or None, self._on_file_bytes, bytes(self._tail), self.total_bytes, self.limit_bytes)
        self._memory.clear()
        self._tail.clear()
        self._spool.add_finished(output)
        return output


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

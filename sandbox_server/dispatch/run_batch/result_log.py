"""The results of one run-batch as lines of JSON in files, in the order in which the items finish.

Results are never kept in memory. The lines of a run-batch that has a `request_key` are in one file with a name, which is kept for a repeated request.
Otherwise they are in files without names, each of which is deleted when everything in it has been sent.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.dispatch.run_batch.shared_file import SharedFile, ShortFileWork, open_unnamed_file
from sandbox_server.store.output_files import FreeSpace

SEGMENT_BYTES = 8 << 20
"""A file without a name takes no more lines once it is larger."""
WRITE_BYTES = 256 << 10
READ_BYTES = 64 << 10
INDEX = re.compile(rb'\{"index":([0-9]{1,9}),')


@dataclass(slots=True, eq=False)
class Segment:
    """One file of lines.

    Attributes:
        file: the open file.
        size_bytes: its size.
        last_position: the position of its last line among all lines.
    """

    file: SharedFile
    size_bytes: int = 0
    last_position: int = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The line of one item.

    Attributes:
        index: the place of the item in the request.
        segment: the file that it is in; None if it is in memory.
        offset: where it begins in the file, in bytes.
        size_bytes: its size, without a line end.
        text: a short line that is not kept for a repeated request, and so is in memory.
    """

    index: int
    segment: Segment | None = None
    offset: int = 0
    size_bytes: int = 0
    text: bytes = b""

    @property
    def is_kept(self) -> bool:
        """Whether the line is in a file."""
        return self.segment is not None


@dataclass(slots=True, eq=False)
class Follower:
    """Somebody who reads the lines.

    Attributes:
        reads_at_end: whether it reads them only when all are there.
        position: how many lines it has read.
        read_bytes: how large these are.
    """

    reads_at_end: bool
    position: int = 0
    read_bytes: int = 0


class ResultLog:
    """The lines of one run-batch.

    Args:
        folder: the folder of the files.
        kept_path: the file that is kept for a repeated request; None if the request cannot be repeated.
    """

    def __init__(self, folder: Path, kept_path: Path | None) -> None:
        self.lines: list[Line] = []
        self.changed = asyncio.Event()
        self._folder = folder
        self._kept_path = kept_path
        self._segments: list[Segment] = []
        self._total_bytes = 0
        self._followers: set[Follower] = set()
        self._append_lock = asyncio.Lock()
        self._leave_free = FreeSpace()
        self._short_work = ShortFileWork()

    @property
    def is_kept(self) -> bool:
        """Whether the lines are kept for a repeated request."""
        return self._kept_path is not None

    @property
    def kept_bytes(self) -> int:
        """The size of the file that is kept."""
        return self._segments[0].size_bytes if self.is_kept and self._segments else 0

    async def open_kept(self) -> None:
        """Open the file that is kept, and find the lines that it has. A line that was not written completely is removed.

        Raises:
            StorageUnavailable: the file cannot be read or written.
        """
        assert self._kept_path is not None
        try:
            segment, lines = await asyncio.to_thread(_open_kept_file, self._kept_path)
        except OSError as error:
            raise StorageUnavailable(f"the results in {self._kept_path} cannot be read: {error.strerror}", retry_after_s=5) from error
        self._segments.append(segment)
        self.lines = lines
        self._total_bytes = sum(line.size_bytes for line in lines)

    def stop_keeping(self) -> None:
        """Append to the file that is kept no more. Its lines can be read until all followers have read them, also if the file is deleted."""
        self._kept_path = None

    async def append(self, index: int, pieces: AsyncGenerator[bytes, None]) -> None:
        """Append the line of an item to a file.

        Args:
            index: the place of the item in the request.
            pieces: the line, without a line end.

        Raises:
            StorageUnavailable: it cannot be written; nothing was appended.
        """
        async with self._append_lock, aclosing(pieces):
            try:
                segment = await self._writable_segment()
                size_bytes = await self._write_pieces(segment, pieces)
            except OSError as error:
                raise StorageUnavailable(f"the result of an item cannot be written to {self._folder}: {error.strerror}", retry_after_s=5) from error
            self._add_line(Line(index=index, segment=segment, offset=segment.size_bytes, size_bytes=size_bytes))
            segment.last_position = len(self.lines) - 1
            segment.size_bytes += size_bytes + 1

    def append_unkept(self, index: int, text: bytes) -> None:
        """Append a short line that a repeated request does not get."""
        self._add_line(Line(index=index, size_bytes=len(text), text=text))

    def remove_unkept(self) -> list[int]:
        """Remove the lines that are not kept. To be called while nobody follows.

        Returns:
            The places of their items.
        """
        removed = [line.index for line in self.lines if not line.is_kept]
        self.lines = [line for line in self.lines if line.is_kept]
        self._total_bytes = sum(line.size_bytes for line in self.lines)
        return removed

    def _add_line(self, line: Line) -> None:
        self.lines.append(line)
        self._total_bytes += line.size_bytes
        self.notify()

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    async def _writable_segment(self) -> Segment:
        if self._segments and (self.is_kept or self._segments[-1].size_bytes < SEGMENT_BYTES):
            return self._segments[-1]
        segment = Segment(await asyncio.to_thread(open_unnamed_file, self._folder))
        self._segments.append(segment)
        return segment

    async def _write_pieces(self, segment: Segment, pieces: AsyncGenerator[bytes, None]) -> int:
        buffer, start = bytearray(), segment.size_bytes
        written_bytes = 0
        async for piece in pieces:
            buffer += piece
            if len(buffer) >= WRITE_BYTES:
                written_bytes += await self._write(segment, start + written_bytes, bytes(buffer))
                buffer.clear()
        buffer += b"\n"
        written_bytes += await self._write(segment, start + written_bytes, bytes(buffer))
        return written_bytes - 1

    async def _write(self, segment: Segment, offset: int, content: bytes) -> int:
        write = functools.partial(segment.file.write_within_room, offset, content, self._leave_free)
        if self._short_work.is_allowed(len(content)):
            return self._short_work.run(write)
        writing = asyncio.ensure_future(asyncio.to_thread(write))
        try:
            return await asyncio.shield(writing)
        finally:
            await asyncio.wait((writing,))  # also if this is cancelled: the next line must not be written while this one is

    # Reading.

    def follow(self, *, reads_at_end: bool) -> Follower:
        """Begin to read the lines from the first one on. `reads_at_end`: only when all are there."""
        follower = Follower(reads_at_end)
        self._followers.add(follower)
        return follower

    def unfollow(self, follower: Follower) -> None:
        """Take note that a follower has gone. A second call does nothing."""
        self._followers.discard(follower)
        self.notify()

    @property
    def is_followed(self) -> bool:
        """Whether anybody reads the lines."""
        return bool(self._followers)

    def unread_bytes(self) -> int:
        """The size of the lines that the fastest follower has not read; 0 if one reads them only at the end."""
        if any(follower.reads_at_end for follower in self._followers):
            return 0
        return self._total_bytes - max((follower.read_bytes for follower in self._followers), default=0)

    def advance(self, follower: Follower) -> None:
        """Take note that a follower has read its next line. Files whose lines all followers have read are deleted."""
        follower.read_bytes += self.lines[follower.position].size_bytes
        follower.position += 1
        self.notify()
        if self.is_kept:
            return
        slowest = min(one.position for one in self._followers)
        while len(self._segments) > 1 and self._segments[0].last_position < slowest:
            self._segments.pop(0).file.close()

    async def read(self, line: Line) -> AsyncGenerator[bytes, None]:
        """Read one line, in pieces and without a line end.

        Raises:
            StorageUnavailable: the file cannot be read.
        """
        if line.segment is None:
            yield line.text
            return
        for start in range(0, line.size_bytes, READ_BYTES):
            size_bytes = min(READ_BYTES, line.size_bytes - start)
            try:
                read = functools.partial(line.segment.file.read_at, line.offset + start, size_bytes)
                yield self._short_work.run(read) if self._short_work.is_allowed(size_bytes) else await asyncio.to_thread(read)
            except OSError as error:
                raise StorageUnavailable(f"the result of an item cannot be read: {error.strerror}", retry_after_s=5) from error

    def close(self) -> None:
        """Close all files. The file that is kept stays on the disk."""
        for segment in self._segments:
            segment.file.close()
        self._segments.clear()


def _open_kept_file(path: Path) -> tuple[Segment, list[Line]]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    segment, offset = Segment(SharedFile(descriptor)), 0
    lines: list[Line] = []
    with open(descriptor, "rb", closefd=False) as file:
        for text in file:
            found = INDEX.match(text)
            if not text.endswith(b"\n") or found is None:
                break
            lines.append(Line(index=int(found[1]), segment=segment, offset=offset, size_bytes=len(text) - 1))
            offset += len(text)
    os.ftruncate(descriptor, offset)
    segment.size_bytes, segment.last_position = offset, len(lines) - 1
    return segment, lines

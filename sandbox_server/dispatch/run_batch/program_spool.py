"""The programs of one request in a temporary file, so that only those that run are in memory."""

from __future__ import annotations

import asyncio
import functools
from array import array
from pathlib import Path

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.dispatch.run_batch.shared_file import SharedFile, ShortFileWork, open_unnamed_file
from sandbox_server.dispatch.run_batch.values import ItemsDigest, Program, RunBatchRequest, decode_program, encode_program
from sandbox_server.store.output_files import FreeSpace

WRITE_BYTES = 256 << 10
"""Programs are written when so many bytes of them are in memory. All programs of a request stay in memory if they are smaller together."""


class ProgramSpool:
    """The programs of one request, in order. Append all of them, then call `finish`, then read them.

    Args:
        folder: the folder of the temporary file, which has no name there.
        request: the other fields of the request, for the digest.
        leave_free: how much of the disk is left free.
    """

    def __init__(self, folder: Path, request: RunBatchRequest, leave_free: FreeSpace | None = None) -> None:
        self._folder = folder
        self._leave_free = leave_free or FreeSpace()
        self._file: SharedFile | None = None
        self._short_work = ShortFileWork()
        self._digest = ItemsDigest(request)
        self._ends = array("Q")
        self._size_bytes = 0
        self._buffer = bytearray()

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def digest(self) -> str:
        """The digest of the request, as far as its items have been appended."""
        return self._digest.hexdigest()

    async def append(self, program: Program) -> None:
        """Append a program.

        Raises:
            StorageUnavailable: the disk does not have enough room, or the file cannot be written.
        """
        encoded = encode_program(program)
        self._digest.add_item(encoded)
        self._buffer += encoded
        self._size_bytes += len(encoded)
        self._ends.append(self._size_bytes)
        if len(self._buffer) >= WRITE_BYTES:
            await self._write_buffer()

    async def finish(self) -> None:
        """Write what is still in memory, unless that is all.

        Raises:
            StorageUnavailable: the disk does not have enough room, or the file cannot be written.
        """
        if self._buffer and self._file is not None:
            await self._write_buffer()

    async def _write_buffer(self) -> None:
        content, self._buffer = bytes(self._buffer), bytearray()
        try:
            if self._file is None:
                self._file = await asyncio.to_thread(open_unnamed_file, self._folder)
            await asyncio.to_thread(self._file.write_within_room, self._size_bytes - len(content), content, self._leave_free)
        except OSError as error:
            problem = f"the items of a run-batch cannot be written to {self._folder}: {error.strerror}"
            raise StorageUnavailable(f"{problem}. Nothing has run; send the request again when the disk has room", retry_after_s=5) from error

    async def read(self, index: int) -> Program:
        """Read one program.

        Args:
            index: its place in the request.

        Raises:
            StorageUnavailable: the file cannot be read.
        """
        start = self._ends[index - 1] if index else 0
        size_bytes = self._ends[index] - start
        if self._file is None:
            return decode_program(bytes(self._buffer[start : start + size_bytes]))
        try:
            read = functools.partial(_read_program, self._file, start, size_bytes)
            return self._short_work.run(read) if self._short_work.is_allowed(size_bytes) else await asyncio.to_thread(read)
        except OSError as error:
            raise StorageUnavailable(f"an item of a run-batch cannot be read: {error.strerror}", retry_after_s=5) from error

    def close(self) -> None:
        """Delete the file. A second call does nothing."""
        if self._file is not None:
            self._file.close()


def _read_program(file: SharedFile, offset: int, size_bytes: int) -> Program:
    return decode_program(file.read_at(offset, size_bytes))

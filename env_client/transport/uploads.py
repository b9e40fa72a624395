"""The content of an upload, and whether it can be read a second time."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import BinaryIO, cast

CHUNK_BYTES = 256 * 1024

#: Bytes, a local path, an open binary file (read from its current position), or an iterable of chunks.
Source = bytes | bytearray | memoryview | os.PathLike[str] | BinaryIO | Iterable[bytes]
AsyncSource = Source | AsyncIterable[bytes]


class Upload:
    """The content of one upload. It can be sent several times if its source can be read again.

    Args:
        source: bytes, a local path, an open binary file, or an iterable of chunks. A plain `str` is refused: it could be a path or the content.

    Raises:
        TypeError: the source is a `str`.
    """

    def __init__(self, source: AsyncSource) -> None:
        if isinstance(source, str):
            raise TypeError("an upload is bytes, a pathlib.Path, a binary file or an iterable of bytes; not a str, which could be a path or the content")
        self._source = source
        self._start_offset: int | None = None
        self._reading_began = False
        if hasattr(source, "read"):
            file = cast(BinaryIO, source)
            self._start_offset = file.tell() if file.seekable() else None

    @property
    def rewindable(self) -> bool:
        """Whether the content can be read from its beginning (again)."""
        if not self._reading_began or isinstance(self._source, bytes | bytearray | memoryview | os.PathLike) or self._start_offset is not None:
            return True
        # A list of chunks can be iterated again; an iterator is its own iterator and cannot.
        return isinstance(self._source, Iterable) and not hasattr(self._source, "read") and iter(self._source) is not self._source

    @property
    def size_bytes(self) -> int | None:
        """The size of the content, if it is known without reading the content."""
        if isinstance(self._source, bytes | bytearray):
            return len(self._source)
        if isinstance(self._source, memoryview):
            return self._source.nbytes
        return os.stat(self._source).st_size if isinstance(self._source, os.PathLike) else None

    def read_chunks(self) -> Iterator[bytes]:
        """Yield the content from its beginning.

        Raises:
            TypeError: the source is of a type that only an asynchronous client accepts, or none.
        """
        source, self._reading_began = self._source, True
        if isinstance(source, bytes | bytearray | memoryview):
            yield bytes(source)
        elif isinstance(source, os.PathLike):
            with open(source, "rb") as file:
                yield from _read_file(file)
        elif hasattr(source, "read"):
            opened = cast(BinaryIO, source)
            if self._start_offset is not None:
                opened.seek(self._start_offset)
            yield from _read_file(opened)
        elif isinstance(source, Iterable):
            yield from source
        else:
            raise TypeError(f"this client cannot read an upload from a {type(source).__name__}")

    async def read_async_chunks(self) -> AsyncIterator[bytes]:
        """Yield the content from its beginning. Files are read in a thread."""
        if isinstance(self._source, AsyncIterable):
            self._reading_began = True
            async for chunk in self._source:
                yield chunk
        elif isinstance(self._source, os.PathLike) or hasattr(self._source, "read"):
            chunks = self.read_chunks()
            while chunk := await asyncio.to_thread(next, chunks, b""):
                yield chunk
        else:
            for chunk in self.read_chunks():
                yield chunk


def _read_file(file: io.BufferedIOBase | BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk

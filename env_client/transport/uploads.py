"""Where the bytes of an upload come from, and whether they can be had a second time."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator
from typing import BinaryIO, cast

CHUNK_BYTES = 256 * 1024

#: Bytes, a local path, an open binary file (from its present position), or chunks.
Source = bytes | bytearray | memoryview | os.PathLike[str] | BinaryIO | Iterable[bytes]
AsyncSource = Source | AsyncIterable[bytes]


class Upload:
    """One upload, which may be sent several times if its source can be rewound.

    Args:
        source: bytes, a local path, an open binary file, or an iterable of chunks. A plain `str` is refused: it could be a path or the content.
    """

    def __init__(self, source: AsyncSource) -> None:
        if isinstance(source, str):
            raise TypeError("an upload is bytes, a pathlib.Path, a binary file or an iterable of bytes; not a str, which could be a path or the content")
        self._source = source
        self._start: int | None = None
        self._spent = False
        if hasattr(source, "read"):
            file = cast(BinaryIO, source)
            self._start = file.tell() if file.seekable() else None

    @property
    def rewindable(self) -> bool:
        """Whether the bytes can be had from the beginning once more."""
        if not self._spent or isinstance(self._source, bytes | bytearray | memoryview | os.PathLike) or self._start is not None:
            return True
        # A list of chunks can be walked again; an iterator is its own iterator and cannot.
        return isinstance(self._source, Iterable) and not hasattr(self._source, "read") and iter(self._source) is not self._source

    @property
    def size_bytes(self) -> int | None:
        """How many bytes there are, where it can be told without reading them."""
        if isinstance(self._source, bytes | bytearray):
            return len(self._source)
        if isinstance(self._source, memoryview):
            return self._source.nbytes
        return os.stat(self._source).st_size if isinstance(self._source, os.PathLike) else None

    def chunks(self) -> Iterator[bytes]:
        """The bytes from the beginning."""
        source, self._spent = self._source, True
        if isinstance(source, bytes | bytearray | memoryview):
            yield bytes(source)
        elif isinstance(source, os.PathLike):
            with open(source, "rb") as file:
                yield from _read(file)
        elif hasattr(source, "read"):
            opened = cast(BinaryIO, source)
            if self._start is not None:
                opened.seek(self._start)
            yield from _read(opened)
        elif isinstance(source, Iterable):
            yield from source
        else:
            raise TypeError(f"{type(source).__name__} is no source of bytes for this client")

    async def achunks(self) -> AsyncIterator[bytes]:
        """The bytes from the beginning; files are read off the event loop."""
        if isinstance(self._source, AsyncIterable):
            self._spent = True
            async for chunk in self._source:
                yield chunk
        elif isinstance(self._source, os.PathLike) or hasattr(self._source, "read"):
            chunks = self.chunks()
            while chunk := await asyncio.to_thread(next, chunks, b""):
                yield chunk
        else:
            for chunk in self.chunks():
                yield chunk


def _read(file: io.BufferedIOBase | BinaryIO) -> Iterator[bytes]:
    while chunk := file.read(CHUNK_BYTES):
        yield chunk

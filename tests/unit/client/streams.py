"""Response bodies whose connection breaks."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx


class CutStream(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A body that delivers chunks, and then fails with a broken connection."""

    def __init__(self, *chunks: bytes) -> None:
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        yield from self._chunks
        raise httpx.ReadError("connection reset")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self._chunks:
            yield chunk
        raise httpx.ReadError("connection reset")

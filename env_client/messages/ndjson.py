"""Splits a response body into lines of JSON. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Iterator


class LineParser:
    """The lines of one response body that are not empty."""

    def __init__(self) -> None:
        self._line = bytearray()

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take a chunk; yield each line that is complete."""
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._line += line
            complete_line = bytes(self._line).strip()
            self._line.clear()
            if complete_line:
                yield complete_line
        self._line += rest

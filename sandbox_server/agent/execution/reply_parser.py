"""Parses the reply of a forked tool: the length of a JSON header, the header, then raw content. `inslot/reply.py` writes it.

The reply comes from inside the slot, so it may be anything.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from sandbox_server.agent.execution.processes.slot_process import Writable

_LENGTH = struct.Struct(">I")
MAX_HEADER_BYTES = 8 << 20


class ReplyParser:
    """Parses the header, and writes the content that follows it to `content`.

    Args:
        content: receives the content.

    Attributes:
        header: the header; None until it is complete.
        is_invalid: whether what was received is not a valid header, whatever follows.
    """

    __slots__ = ("_buffer", "_content", "header", "is_invalid")

    def __init__(self, content: Writable) -> None:
        self._content = content
        self._buffer = bytearray()
        self.header: dict[str, Any] | None = None
        self.is_invalid = False

    @property
    def is_full(self) -> bool:
        """See `Writable`."""
        return self._content.is_full

    def write(self, data: bytes) -> None:
        """Parse some more of the reply."""
        if self.header is not None:
            self._content.write(data)
            return
        if self.is_invalid:
            return
        self._buffer += data
        if len(self._buffer) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(self._buffer)
        end = _LENGTH.size + length
        if length > MAX_HEADER_BYTES:
            self.is_invalid = True
        elif len(self._buffer) >= end:
            self._parse_header(bytes(self._buffer[_LENGTH.size : end]), bytes(self._buffer[end:]))
        if self.is_invalid:
            self._buffer.clear()

    def _parse_header(self, document: bytes, rest: bytes) -> None:
        try:
            header = json.loads(document)
        except (ValueError, RecursionError):
            header = None
        self._buffer.clear()
        if not isinstance(header, dict):
            self.is_invalid = True
            return
        self.header = header
        if rest:
            self._content.write(rest)

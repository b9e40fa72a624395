"""The recent output of a terminal, for viewers that are a little behind and for those that come later."""

from __future__ import annotations

SCROLLBACK_BYTES = 256 << 10
_LINE_WITHIN_BYTES = 4096


class Scrollback:
    """The last bytes that a terminal has written. Their offsets count from its first byte.

    Args:
        most_bytes: how many bytes are kept.
    """

    def __init__(self, most_bytes: int = SCROLLBACK_BYTES) -> None:
        self._most_bytes = most_bytes
        self._kept = bytearray()
        self.end = 0

    @property
    def start(self) -> int:
        """The offset of the oldest byte that is kept."""
        return self.end - len(self._kept)

    def append(self, data: bytes) -> None:
        """Add output, and forget the oldest bytes beyond what is kept."""
        self._kept += data
        self.end += len(data)
        excess = len(self._kept) - self._most_bytes
        if excess > 0:
            del self._kept[:excess]

    def read(self, offset: int, most_bytes: int) -> bytes:
        """Return at most so many bytes from an offset on, which must not be before `start`."""
        at = offset - self.start
        return bytes(self._kept[at : at + most_bytes])

    def find_replay_offset(self, most_bytes: int) -> int:
        """Return where a viewer begins that gets the last bytes: at the beginning of the output or of a line, if there is one nearby.

        Args:
            most_bytes: how many bytes the viewer gets at most.
        """
        at = max(0, len(self._kept) - most_bytes)
        if at or self.start:
            line_end = self._kept.find(b"\n", at, at + _LINE_WITHIN_BYTES)
            at = line_end + 1 if line_end >= 0 else at
        return self.start + at

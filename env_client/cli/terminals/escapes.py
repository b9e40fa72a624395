"""What a person types to leave a terminal: as in ssh, a tilde at the beginning of a line, then a dot."""

from __future__ import annotations

from dataclasses import dataclass

_LINE_ENDS = b"\r\n"


@dataclass(frozen=True, slots=True)
class Typed:
    """What was typed: the keys for the program, and whether the person wants to leave."""

    keys: bytes
    leaves: bool = False


class EscapeReader:
    """Separates `~.` from the keys for the program. `~~` at the beginning of a line is one tilde."""

    def __init__(self) -> None:
        self._at_line_start = True
        self._holds_tilde = False

    def read(self, data: bytes) -> Typed:
        """Read what was typed next."""
        keys = bytearray()
        for byte in data:
            if self._holds_tilde:
                self._holds_tilde = False
                if byte == ord("."):
                    return Typed(bytes(keys), leaves=True)
                keys += b"~" if byte == ord("~") else b"~%c" % byte
            elif self._at_line_start and byte == ord("~"):
                self._holds_tilde = True
                continue
            else:
                keys.append(byte)
            self._at_line_start = byte in _LINE_ENDS
        return Typed(bytes(keys))

"""The modes that programs set in a terminal, such as the alternate screen, so that they can be undone when a person leaves while a program still runs."""

from __future__ import annotations

import re

_SWITCH = re.compile(rb"\x1b\[\?([0-9;]{1,64})([hl])")
#: The modes that are undone: cursor keys, the alternate screens, mouse reports, focus reports, bracketed paste.
_OFF_BY_DEFAULT = frozenset({1, 47, 1000, 1001, 1002, 1003, 1004, 1005, 1006, 1015, 1047, 1049, 2004})
#: Wrapped lines, and the cursor.
_ON_BY_DEFAULT = frozenset({7, 25})
_LONGEST_SWITCH_BYTES = 68
_RESET_COLOURS = b"\x1b[0m"


class ScreenModes:
    """Follows the modes that the output of a terminal sets."""

    def __init__(self) -> None:
        self._changed: set[int] = set()
        self._rest = b""

    def follow(self, output: bytes) -> None:
        """Read some output."""
        output = self._rest + output
        read_bytes = 0
        for switch in _SWITCH.finditer(output):
            read_bytes = switch.end()
            is_set = switch[2] == b"h"
            for mode in (int(word) for word in switch[1].split(b";") if word):
                if mode in _OFF_BY_DEFAULT or mode in _ON_BY_DEFAULT:
                    (self._changed.add if is_set != (mode in _ON_BY_DEFAULT) else self._changed.discard)(mode)
        self._rest = output[max(read_bytes, len(output) - _LONGEST_SWITCH_BYTES) :]  # a switch may be cut

    def undo(self) -> bytes:
        """Return what undoes the modes that are set."""
        switches = b"".join(b"\x1b[?%d%c" % (mode, b"h" if mode in _ON_BY_DEFAULT else b"l") for mode in sorted(self._changed, reverse=True))
        return _RESET_COLOURS + switches

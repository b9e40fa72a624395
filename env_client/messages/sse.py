"""Server-sent events out of the pieces of a body. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its name, its data, and the id that was last said."""

    name: str
    data: str
    id: str


class EventReader:
    """Reads a stream of events, however it is cut into pieces. Comments are passed over; an event that is not finished is not one."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []
        self._name = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Take a piece; gives each event that is now whole."""
        self._rest.append(chunk)
        if b"\n" not in chunk and b"\r" not in chunk:  # a long line in many pieces is put together once
            return
        text, at = b"".join(self._rest), 0
        for end in _LINE_END.finditer(text):
            line, at = text[at : end.start()], end.end()
            event = self._line(line.decode("utf-8", "replace"))
            if event is not None:
                yield event
        self._rest = [text[at:]]

    def _line(self, line: str) -> ServerEvent | None:
        if not line:
            return self._finish()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _finish(self) -> ServerEvent | None:
        event = ServerEvent(self._name or "message", "\n".join(self._data), self._id) if self._data else None
        self._name, self._data = "", []
        return event

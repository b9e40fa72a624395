"""An incremental parser for server-sent events. It does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One event: its name, its data, and the last id that the stream has sent."""

    name: str
    data: str
    id: str


class EventParser:
    """Parses a stream of server-sent events that arrives in chunks of any size.

    Comments are skipped. An event whose terminating empty line has not arrived is not returned.
    """

    def __init__(self) -> None:
        self._incomplete_line: list[bytes] = []
        self._name = ""
        self._data: list[str] = []
        self._id = ""

    def feed(self, chunk: bytes) -> Iterator[ServerEvent]:
        """Take the next chunk; yield the events that are complete."""
        self._incomplete_line.append(chunk)
        if b"\n" not in chunk and b"\r" not in chunk:  # joining a long line once, at its end, keeps the cost linear
            return
        text, line_start = b"".join(self._incomplete_line), 0
        for line_end in _LINE_END.finditer(text):
            line, line_start = text[line_start : line_end.start()], line_end.end()
            event = self._parse_line(line.decode("utf-8", "replace"))
            if event is not None:
                yield event
        self._incomplete_line = [text[line_start:]]

    def _parse_line(self, line: str) -> ServerEvent | None:
        """Take one line; return the event that it completes, if any."""
        if not line:
            return self._complete_event()
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "event":
            self._name = value
        elif name == "id" and "\0" not in value:
            self._id = value
        return None

    def _complete_event(self) -> ServerEvent | None:
        """Return the event collected so far; None if it has no data, as the specification demands."""
        event = ServerEvent(self._name or "message", "\n".join(self._data), self._id) if self._data else None
        self._name, self._data = "", []
        return event

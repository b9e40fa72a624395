"""The events of a run, in the order in which the harness saw them. The checker reads nothing else."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One event.

    Args:
        at: when it happened, in seconds since the history began.
        kind: the kind of event.
        fields: its details, as JSON values.
    """

    at: float
    kind: str
    fields: Mapping[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __str__(self) -> str:
        return f"{self.at:9.3f} {self.kind:16} " + " ".join(f"{name}={json.dumps(value)}" for name, value in self.fields.items())


class History:
    """All events of a run. They are recorded in one event loop, so that their order is the order in which they were seen.

    Args:
        clock: returns monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.events: list[Event] = []
        self._clock = clock
        self._began = clock()

    def now(self) -> float:
        """Return the seconds since the history began."""
        return self._clock() - self._began

    def note(self, kind: str, **fields: Any) -> None:
        """Record an event that happens now."""
        self.events.append(Event(self.now(), kind, fields))

    def write(self, path: Path) -> None:
        """Write the events to a file, one per line."""
        path.write_text("".join(f"{event}\n" for event in self.events), encoding="utf-8")


def about(events: Collection[Event], names: Collection[str], *, always: Collection[str] = ("fault", "service")) -> Iterator[Event]:
    """Yield the events that mention any of these names, and the faults between the first and the last of them.

    Args:
        events: all events.
        names: ids of leases, calls, sandboxes and keys.
        always: kinds that belong to every lease.
    """
    mentions = [event for event in events if any(name in str(event) for name in names)]
    if not mentions:
        return
    first, last = mentions[0].at - 1.0, mentions[-1].at + 1.0
    told = set(map(id, mentions))
    for event in events:
        if id(event) in told or (event.kind in always and first <= event.at <= last):
            yield event

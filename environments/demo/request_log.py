"""The record of the requests that a scripted model server got."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: How many bytes of bodies are kept at most.
MAX_BODY_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request for an answer of the model.

    Args:
        number: the number of the request, counted from 1.
        path: the path.
        data: the body.
        status: the status of the response; 0 if the server sends none.
        fault: the kind of the fault; empty without one.
        error: why the request was refused; empty if it was not.
        conversations: the numbers of the conversations that it belongs to, counted from 0.
        trajectory: the name of the trajectory that the first of them plays.
        turn: the turn that it asks for, counted from 1; 0 if it was refused.
    """

    number: int
    path: str
    data: bytes
    status: int
    fault: str = ""
    error: str = ""
    conversations: tuple[int, ...] = ()
    trajectory: str = ""
    turn: int = 0

    @property
    def body(self) -> Any:
        """The body as a JSON value."""
        return json.loads(self.data)


class RequestLog:
    """The latest requests.

    Args:
        max_records: how many are kept.
        max_body_bytes: how many bytes their bodies have at most, together.
    """

    def __init__(self, max_records: int, max_body_bytes: int = MAX_BODY_BYTES) -> None:
        self._max_records = max_records
        self._max_body_bytes = max_body_bytes
        self._records: deque[RequestRecord] = deque()
        self._body_bytes = 0
        self._waiters: dict[asyncio.Future[RequestRecord], Callable[[RequestRecord], bool]] = {}
        self.count = 0

    @property
    def records(self) -> list[RequestRecord]:
        """The records, the oldest first."""
        return sorted(self._records, key=lambda record: record.number)

    def next_number(self) -> int:
        """Return the number of a request that arrives."""
        self.count += 1
        return self.count

    def add(self, record: RequestRecord) -> None:
        """Keep a record, and wake those who wait for it."""
        self._records.append(record)
        self._body_bytes += len(record.data)
        while len(self._records) > self._max_records or (self._body_bytes > self._max_body_bytes and len(self._records) > 1):
            self._body_bytes -= len(self._records.popleft().data)
        for waiter, matches in list(self._waiters.items()):
            if not waiter.done() and matches(record):
                waiter.set_result(record)

    async def wait_for(self, matches: Callable[[RequestRecord], bool]) -> RequestRecord:
        """Return the first record that matches, among those that are kept and those that come."""
        for record in self.records:
            if matches(record):
                return record
        waiter: asyncio.Future[RequestRecord] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = matches
        try:
            return await waiter
        finally:
            del self._waiters[waiter]

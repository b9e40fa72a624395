"""The inbox of a pool: the values that its tasks have observed, in order, until the pool applies them to its state."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Generic, Protocol, TypeVar

Value = TypeVar("Value")
Put = TypeVar("Put", contravariant=True)


class InboxWriter(Protocol[Put]):
    """The side of an inbox that observing tasks use."""

    def put(self, value: Put) -> None:
        """See `Inbox.put`."""

    async def put_and_wait(self, value: Put) -> None:
        """See `Inbox.put_and_wait`."""


class Inbox(Generic[Value]):
    """A queue of observed values, which one reader takes out in order. Putting a value never waits."""

    def __init__(self) -> None:
        self._values: deque[tuple[Value, asyncio.Future[None] | None]] = deque()
        self._filled = asyncio.Event()

    def put(self, value: Value) -> None:
        """Add a value. The pool applies it in one of the next turns of the event loop."""
        self._values.append((value, None))
        self._filled.set()

    async def put_and_wait(self, value: Value) -> None:
        """Add a value and wait until the pool has applied it and carried out its effects."""
        applied: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._values.append((value, applied))
        self._filled.set()
        await applied

    async def wait_until_filled(self) -> None:
        """Wait until there is at least one value."""
        await self._filled.wait()

    def take_next(self) -> tuple[Value, asyncio.Future[None] | None] | None:
        """Take the oldest value out.

        Returns:
            The value, and the future to complete with `confirm_applied` once it is applied, if there is one; None if the inbox is empty.
        """
        if not self._values:
            self._filled.clear()
            return None
        return self._values.popleft()


def confirm_applied(applied: asyncio.Future[None] | None) -> None:
    """Let the caller of `put_and_wait`, if there is one, go on."""
    if applied is not None and not applied.done():
        applied.set_result(None)

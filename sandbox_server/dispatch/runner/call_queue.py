"""The calls of one lease in one request that have no result yet. A plain data structure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from sandbox_server.core.execution import ToolCall


class QueuedCall(NamedTuple):
    """A call and its place in the request."""

    item_index: int
    call: ToolCall


class PoppedCall(NamedTuple):
    """A call that has left the queue, its place in the request, and whether it had been sent to its agent."""

    item_index: int
    call: ToolCall
    was_sent: bool


class CallQueue:
    """The calls in order. The first `sent_count` of them have been sent to the agent.

    Args:
        calls: the calls with their places in the request.
    """

    def __init__(self, calls: Iterable[tuple[int, ToolCall]]) -> None:
        self._calls = deque(QueuedCall(item_index, call) for item_index, call in calls)
        self.sent_count = 0

    def __len__(self) -> int:
        return len(self._calls)

    @property
    def first_call(self) -> ToolCall:
        """The call whose result is due next."""
        return self._calls[0].call

    def first_calls(self, count: int) -> list[ToolCall]:
        """The first calls of the queue."""
        return [queued.call for queued in itertools.islice(self._calls, count)]

    def queued_calls(self, *, unsent_only: bool) -> list[QueuedCall]:
        """The calls of the queue, or those that have not been sent."""
        return list(itertools.islice(self._calls, self.sent_count if unsent_only else 0, None))

    def remove_call(self, queued: QueuedCall) -> None:
        """Take a call out of the queue."""
        position = self._calls.index(queued)
        del self._calls[position]
        if position < self.sent_count:
            self.sent_count -= 1

    def pop_first(self) -> QueuedCall:
        """Take the first call, which has been sent, out of the queue."""
        self.sent_count -= 1
        return self._calls.popleft()

    def pop_calls(self, count: int | None = None) -> list[PoppedCall]:
        """Take the first `count` calls out of the queue, or all of them."""
        leaving = enumerate(itertools.islice(self._calls, count))
        popped = [PoppedCall(queued.item_index, queued.call, position < self.sent_count) for position, queued in leaving]
        for _ in popped:
            self._calls.popleft()
        self.sent_count = max(0, self.sent_count - len(popped))
        return popped

    def pop_all_but_first(self) -> list[PoppedCall]:
        """Take all calls behind the first out of the queue."""
        first, sent_count = self._calls.popleft(), self.sent_count
        self.sent_count -= 1
        popped = self.pop_calls()
        self._calls.append(first)
        self.sent_count = min(sent_count, 1)
        return popped

"""The stream of results of one batch. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from env_client.errors import BadAnswer, ConnectionLost
from env_client.messages.calls import assign_call_ids, exec_batch_message, parse_result_line
from env_client.messages.message import Message
from env_client.messages.ndjson import LineParser
from env_client.retry import CallUnfinished
from env_client.values import Call, Result


class BatchStream:
    """The results of one batch in the order in which the calls end; a `ResumableStream`.

    Args:
        calls: the calls of the batch. A call without an id gets one here, so that a repeated request finds the same call.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = assign_call_ids(calls)
        self._pending = dict(enumerate(self._calls))
        self._unfinished: dict[int, Result] = {}
        self._parser = LineParser()

    @property
    def done(self) -> bool:
        """Whether every result has arrived."""
        return not self._pending

    def next_message(self) -> Message[tuple[Result, ...]]:
        """Build the request for the missing results. The service does not run a call again that it has run already."""
        self._parser = LineParser()
        return exec_batch_message(list(self._pending.values()), stream=True)

    def feed(self, chunk: bytes) -> Iterator[tuple[int, Result]]:
        """Take a chunk; yield each complete result with the index of its call in the batch.

        Raises:
            BadAnswer: a line is not a result, or is the result of a call that is not pending.
        """
        for line in self._parser.feed(chunk):
            indexed_result = self._take_result(parse_result_line(line))
            if indexed_result is not None:
                yield indexed_result

    def end_of_body(self) -> None:
        """Take note that the response body has ended.

        Raises:
            CallUnfinished: the service stopped before the pending calls ended; the next message sends them again.
            ConnectionLost: results are missing.
        """
        if self._pending and self._pending.keys() <= self._unfinished.keys():
            raise CallUnfinished
        if self._pending:
            raise ConnectionLost(f"the response ended with {len(self._pending)} of {len(self._calls)} results missing")

    def unfinished_items(self) -> Iterator[tuple[int, Result]]:
        """Yield the results that a service that stopped has sent for calls that did not end."""
        for index, result in self._unfinished.items():
            if self._pending.pop(index, None) is not None:
                yield index, result

    def _take_result(self, result: Result) -> tuple[int, Result] | None:
        """Assign a result to a pending call; None if the service stopped before the call ended."""
        for index, (call, call_id) in self._pending.items():
            if call_id == result.call_id and call.lease_id == result.lease_id:
                if result.unfinished:
                    if index in self._unfinished:
                        continue  # the batch holds the same call more than once
                    self._unfinished[index] = result
                    return None
                del self._pending[index]
                return index, result
        raise BadAnswer(f"the service sent a result of call {result.call_id!r}, which the batch does not contain")

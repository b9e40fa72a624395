"""A streamed batch: which results have come, and what to ask again for when the connection is cut. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from env_client.errors import BadAnswer, ConnectionLost
from env_client.messages.message import Message
from env_client.messages.verbs import exec_batch, named, result_line
from env_client.retry import Unfinished
from env_client.values import Call, Result


class BatchProgress:
    """The calls of one batch and the results that are still due.

    Args:
        calls: the batch; a call without an id gets one here, so that asking again finds the same call.
    """

    def __init__(self, calls: Iterable[Call]) -> None:
        self._calls = named(calls)
        self._due = dict(enumerate(self._calls))
        self._unfinished: dict[int, Result] = {}
        self._line = bytearray()

    @property
    def done(self) -> bool:
        """Whether every result has come."""
        return not self._due

    def message(self) -> Message[tuple[Result, ...]]:
        """Asks for the results that are still due; the calls that ran already are not run again."""
        self._line.clear()
        return exec_batch(list(self._due.values()), stream=True)

    def feed(self, chunk: bytes) -> Iterator[tuple[int, Result]]:
        """Take a piece of the answer; gives each result that is now whole, with its place in the batch.

        Raises:
            BadAnswer: a line that is no result, or the result of no call that is due.
        """
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            self._line += line
            whole = bytes(self._line).strip()
            self._line.clear()
            if whole and (took := self._take(result_line(whole))) is not None:
                yield took
        self._line += rest

    def ended(self) -> None:
        """The answer is over.

        Raises:
            Unfinished: the service stopped before some calls ended; `message` sends them again.
            ConnectionLost: some results have not come.
        """
        if self._due and self._due.keys() <= self._unfinished.keys():
            raise Unfinished
        if self._due:
            raise ConnectionLost(f"the answer ended with {len(self._due)} of {len(self._calls)} results missing")

    def give_up(self) -> Iterator[tuple[int, Result]]:
        """Nobody asks again; gives what a service that stopped has said."""
        for index, result in self._unfinished.items():
            if self._due.pop(index, None) is not None:
                yield index, result

    def _take(self, result: Result) -> tuple[int, Result] | None:
        for index, (call, call_id) in self._due.items():
            if call_id == result.call_id and call.lease_id == result.lease_id:
                if result.unfinished:
                    if index in self._unfinished:
                        continue  # of the same call again
                    self._unfinished[index] = result
                    return None
                del self._due[index]
                return index, result
        raise BadAnswer(f"the service sent a result of call {result.call_id!r}, which was not asked for")

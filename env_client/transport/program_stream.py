"""The stream of results of many programs. Nothing here does I/O."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from env_client.errors import BadAnswer, ConnectionLost
from env_client.messages.message import Message, without_none
from env_client.messages.ndjson import LineParser
from env_client.messages.programs import Program, ProgramResult, encode_programs, new_request_key, parse_program_line, run_batch_message
from env_client.retry import CallUnfinished


class ProgramStream:
    """The results of many programs in the order in which they finish; a `ResumableStream`.

    Args:
        programs: the programs.
        header: the other fields of the request. Without a `request_key` the stream makes one, so that a repeated request gets the same results.
    """

    def __init__(self, programs: Iterable[Program | Mapping[str, Any]], header: Mapping[str, Any]) -> None:
        self._lines = encode_programs(programs)
        fields = without_none(header)
        self._message = run_batch_message(self._lines, {"request_key": new_request_key(), **fields})
        self._pending = set(range(len(self._lines)))
        self._unfinished: dict[int, ProgramResult] = {}
        self._parser = LineParser()

    @property
    def done(self) -> bool:
        """Whether every result has arrived."""
        return not self._pending

    def next_message(self) -> Message[None]:
        """Build the request. A repeated one gets the results that are there already once more, and runs no program a second time."""
        self._parser = LineParser()
        self._unfinished.clear()
        return self._message

    def feed(self, chunk: bytes) -> Iterator[ProgramResult]:
        """Take a chunk; yield each complete result that has not been yielded before.

        Raises:
            BadAnswer: a line is not the result of one of the programs.
        """
        for line in self._parser.feed(chunk):
            result = parse_program_line(line)
            if not 0 <= result.index < len(self._lines):
                raise BadAnswer(f"the service sent the result of program {result.index}, and there are {len(self._lines)}")
            if result.index not in self._pending:
                continue
            if result.unfinished:
                self._unfinished[result.index] = result
                continue
            self._pending.discard(result.index)
            yield result

    def end_of_body(self) -> None:
        """Take note that the response body has ended.

        Raises:
            CallUnfinished: the service stopped before the pending programs ended; the next message asks for them again.
            ConnectionLost: results are missing.
        """
        if self._pending and self._pending <= self._unfinished.keys():
            raise CallUnfinished
        if self._pending:
            raise ConnectionLost(f"the response ended with {len(self._pending)} of {len(self._lines)} results missing")

    def unfinished_items(self) -> Iterator[ProgramResult]:
        """Yield the results that a service that stopped has sent for programs that did not end."""
        for index, result in self._unfinished.items():
            self._pending.discard(index)
            yield result

"""Streams that are resumed after a lost connection: what has arrived, and which request asks for the rest. Nothing here does I/O."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from env_client.errors import BadAnswer, ConnectionLost, SandboxError
from env_client.messages.calls import call_events_message, call_output_message, check_result, exec_message
from env_client.messages.message import Message, decode_json
from env_client.messages.server_sent_events import EventParser, ServerEvent
from env_client.messages.service import events_message
from env_client.retry import CallUnfinished
from env_client.transport.retry_budget import RetryBudget
from env_client.values import Call, Event, Output, Result, read_value

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class ResumableStream(Protocol[T_co]):
    """A stream of items that may take several requests."""

    @property
    def done(self) -> bool:
        """Whether all items have arrived."""

    def next_message(self) -> Message[Any]:
        """Build the request for the items that are missing."""

    def feed(self, chunk: bytes) -> Iterator[T_co]:
        """Take a chunk of a response body; yield the items that are complete."""

    def end_of_body(self) -> None:
        """Take note that the response body has ended.

        Raises:
            ConnectionLost: items are missing.
        """

    def unfinished_items(self) -> Iterator[T_co]:
        """Yield what a service that stopped has reported about calls that did not end. Called when no request follows."""


class StreamLoop(Generic[T]):
    """The decisions of the loop that follows one stream over several requests. The senders add the I/O and the waiting.

    Args:
        stream: the stream.
        budget: the time left for retries. Whenever data arrives, it is restored.
    """

    def __init__(self, stream: ResumableStream[T], budget: RetryBudget) -> None:
        self._stream = stream
        self._budget = budget
        self._message: Message[Any] | None = None

    def start_attempt(self) -> Message[Any]:
        """Start timing an attempt; return the message to send."""
        self._message = self._stream.next_message()
        self._budget.start_attempt()
        return self._message

    def feed(self, chunk: bytes) -> Iterator[T]:
        """Take a chunk of the response body; yield the items that are complete."""
        self._budget.record_received_bytes()
        for item in self._stream.feed(chunk):
            self._budget.record_received_item()
            yield item

    def delay_before_retry_s(self, error: SandboxError) -> float | None:
        """Return how long to wait before the next attempt, in seconds; None if there is none."""
        assert self._message is not None, "start_attempt comes first"
        return self._budget.delay_before_retry_s(self._message, error)


class CallEventStream:
    """The output of one call as it is written, then its result.

    Args:
        call: the call, with an id, so that a repeated request finds the same call.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._response_timeout_s = exec_message(call).response_timeout_s
        self._parser = EventParser()
        self._offset = 0
        self._started = False
        self._unfinished: Result | None = None
        self.done = False

    def next_message(self) -> Message[Result]:
        """Build the request that runs the call; once the call is known to run, the request for its events after the output received so far."""
        self._parser = EventParser()
        if not self._started:
            return exec_message(self._call, stream=True, offset=self._offset)
        return call_events_message(self._call.lease_id, self._call.call_id or "", self._offset, self._response_timeout_s)

    def feed(self, chunk: bytes) -> Iterator[Output | Result]:
        """Take a chunk; yield output, and at the end the result.

        Raises:
            BadAnswer: an event is not the contract's.
            InvalidRequest: the program made a mistake in the call.
            CallUnfinished: the service stopped before the call ended; the next message sends the call again.
        """
        for event in self._parser.feed(chunk):
            self._started = True
            if event.name == "output":
                output = _parse_output(event)
                if output.offset > self._offset:  # after a resumption, the service may repeat a piece that has arrived before
                    self._offset = output.offset
                    yield output
            elif event.name == "result":
                yield self._take_result(read_value(Result, decode_json(event.data)))

    def end_of_body(self) -> None:
        """Take note that the response body has ended; without a result, the connection was lost."""
        if not self.done:
            raise ConnectionLost("the response ended without the result of the call")

    def unfinished_items(self) -> Iterator[Output | Result]:
        """Yield the result that a service that stopped has sent for the call, if any."""
        if self._unfinished is not None:
            self.done = True
            yield self._unfinished

    def _take_result(self, result: Result) -> Result:
        if result.unfinished:
            self._unfinished, self._started = result, False
            raise CallUnfinished(result)
        check_result(result, tool_from_program=True)
        self.done = True
        return result


class CallOutputStream:
    """The complete output of a call from a byte offset on."""

    def __init__(self, lease_id: str, call_id: str, offset: int) -> None:
        self._lease_id, self._call_id, self._offset = lease_id, call_id, offset
        self.done = False

    def next_message(self) -> Message[bytes]:
        """Build the request for the bytes that are missing."""
        return call_output_message(self._lease_id, self._call_id, self._offset)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take a chunk and yield it."""
        self._offset += len(chunk)
        yield chunk

    def end_of_body(self) -> None:
        """Take note that the output is complete."""
        self.done = True

    def unfinished_items(self) -> Iterator[bytes]:
        """Yield nothing: a service that stops reports nothing here."""
        return iter(())


class ServiceEventStream:
    """The events of the service, which never end.

    Args:
        after: the id of the last event seen before, or None to begin with the next event.
    """

    done = False

    def __init__(self, after: str | None) -> None:
        self._after = after
        self._parser = EventParser()

    def next_message(self) -> Message[None]:
        """Build the request for the events after the last one."""
        self._parser = EventParser()
        return events_message(self._after)

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Take a chunk; yield the events that are complete.

        Raises:
            BadAnswer: an event is not the contract's.
        """
        for event in self._parser.feed(chunk):
            self._after = event.id or self._after
            data = decode_json(event.data)
            if not isinstance(data, dict):
                raise BadAnswer(f"the service sent the event {event.name!r} without an object")
            at = data.pop("at", 0.0)
            yield Event(kind=event.name, id=event.id, at=at if isinstance(at, int | float) else 0.0, data=data)

    def end_of_body(self) -> None:
        """Report a lost connection: the service or a proxy has ended a response that has no end."""
        raise ConnectionLost("the stream of events ended")

    def unfinished_items(self) -> Iterator[Event]:
        """Yield nothing: a service that stops reports nothing here."""
        return iter(())


def _parse_output(event: ServerEvent) -> Output:
    """Parse an `output` event.

    Each event states its own encoding: after a restart, the service may no longer know which one the call asked for.
    """
    document = decode_json(event.data)
    text = document.get("data") if isinstance(document, dict) else None
    if not isinstance(text, str) or not event.id.isdecimal():
        raise BadAnswer(f"the service sent output without {'its offset' if isinstance(text, str) else 'data'}")
    if document.get("encoding") != "base64":
        return Output(data=text.encode(), offset=int(event.id))
    try:
        return Output(data=base64.b64decode(text, validate=True), offset=int(event.id))
    except ValueError as error:  # raised for text outside ASCII as well
        raise BadAnswer("the service sent output that is not valid base64") from error

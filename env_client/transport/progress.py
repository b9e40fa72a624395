"""Streams that are taken up again where they were cut: what has come, and what to ask for next. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from env_client.errors import BadAnswer, ConnectionLost
from env_client.messages import service, verbs
from env_client.messages.message import Message, decode
from env_client.messages.sse import EventReader, ServerEvent
from env_client.retry import Unfinished
from env_client.values import Call, Event, Output, Result, read_value

T_co = TypeVar("T_co", covariant=True)


class Progress(Protocol[T_co]):
    """A stream that may take several requests."""

    @property
    def done(self) -> bool:
        """Whether all of it has come."""

    def message(self) -> Message[Any]:
        """Asks for what is missing."""

    def feed(self, chunk: bytes) -> Iterator[T_co]:
        """Take a piece of the answer; gives what is now whole."""

    def ended(self) -> None:
        """The answer is over. Raises `ConnectionLost` if it should not be."""

    def give_up(self) -> Iterator[T_co]:
        """Nobody asks again; gives what a service that stopped has said."""


class ExecProgress:
    """The output of one call as it comes, then its result.

    Args:
        call: with an id, so that asking again finds the same call.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._within_s = verbs.exec_one(call).answer_within_s
        self._events = EventReader()
        self._offset = 0
        self._begun = False
        self._unfinished: Result | None = None
        self.done = False

    def message(self) -> Message[Result]:
        """Starts the call; once it is known to run, asks for its events from the byte that is missing."""
        self._events = EventReader()
        if not self._begun:
            return verbs.exec_one(self._call, stream=True, offset=self._offset)
        call_id = self._call.call_id or ""
        return verbs.call_events(self._call.lease_id, call_id, self._offset, self._within_s)

    def feed(self, chunk: bytes) -> Iterator[Output | Result]:
        """Take a piece of the answer; gives output, and the result at the end.

        Raises:
            BadAnswer: an event that is not the contract's.
            InvalidRequest: the program has made a call that is none.
            Unfinished: the service stopped before the call ended; `message` sends it again.
        """
        for event in self._events.feed(chunk):
            self._begun = True
            if event.name == "output":
                output = _output(event)
                if output.offset > self._offset:
                    self._offset = output.offset
                    yield output
            elif event.name == "result":
                yield self._result(read_value(Result, decode(event.data)))

    def ended(self) -> None:
        """The answer is over."""
        if not self.done:
            raise ConnectionLost("the answer ended without the result of the call")

    def give_up(self) -> Iterator[Output | Result]:
        """Nobody asks again."""
        if self._unfinished is not None:
            self.done = True
            yield self._unfinished

    def _result(self, result: Result) -> Result:
        if result.unfinished:
            self._unfinished, self._begun = result, False
            raise Unfinished(result)
        verbs.check_call(result, own_tool=True)
        self.done = True
        return result


class OutputProgress:
    """The whole output of a call, from a byte on."""

    def __init__(self, lease_id: str, call_id: str, offset: int) -> None:
        self._lease_id, self._call_id, self._offset = lease_id, call_id, offset
        self.done = False

    def message(self) -> Message[bytes]:
        """Asks for the bytes that are missing."""
        return verbs.call_output(self._lease_id, self._call_id, self._offset)

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Take a piece."""
        self._offset += len(chunk)
        yield chunk

    def ended(self) -> None:
        """That was all."""
        self.done = True

    def give_up(self) -> Iterator[bytes]:
        """There is nothing more to say."""
        return iter(())


class EventsProgress:
    """Everything that changes, without an end.

    Args:
        after: the last event that was seen before.
    """

    done = False

    def __init__(self, after: str | None) -> None:
        self._after = after
        self._events = EventReader()

    def message(self) -> Message[None]:
        """Asks for what came after the last event."""
        self._events = EventReader()
        return service.events(self._after)

    def feed(self, chunk: bytes) -> Iterator[Event]:
        """Take a piece.

        Raises:
            BadAnswer: an event that is not the contract's.
        """
        for event in self._events.feed(chunk):
            self._after = event.id or self._after
            data = decode(event.data)
            if not isinstance(data, dict):
                raise BadAnswer(f"the service sent the event {event.name!r} without an object")
            at = data.pop("at", 0.0)
            yield Event(kind=event.name, id=event.id, at=at if isinstance(at, int | float) else 0.0, data=data)

    def ended(self) -> None:
        """The service, or something in between, has ended it."""
        raise ConnectionLost("the stream of events ended")

    def give_up(self) -> Iterator[Event]:
        """There is nothing more to say."""
        return iter(())


def _output(event: ServerEvent) -> Output:
    """What an event says itself decides how it is read: after a restart the service may no longer know what the call asked for."""
    document = decode(event.data)
    text = document.get("data") if isinstance(document, dict) else None
    if not isinstance(text, str) or not event.id.isdecimal():
        raise BadAnswer(f"the service sent output without {'its offset' if isinstance(text, str) else 'data'}")
    if document.get("encoding") != "base64":
        return Output(data=text.encode(), offset=int(event.id))
    try:
        return Output(data=base64.b64decode(text, validate=True), offset=int(event.id))
    except ValueError as error:  # also text that is not ASCII
        raise BadAnswer("the service sent output that is not the base64 it should be") from error

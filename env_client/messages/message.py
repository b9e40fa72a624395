"""A request as a value, and the small parts of which requests are made and answers are read. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import quote, urlencode

from env_client.errors import BadAnswer, InvalidRequest

T = TypeVar("T")

JSON = "application/json"
NDJSON = "application/x-ndjson"
EVENT_STREAM = "text/event-stream"
GZIP = "application/gzip"
BYTES = "application/octet-stream"

#: What an ordinary answer may take, in seconds.
PROMPT_S = 30.0
#: What a transfer may pause, and a listing or an unpacking may take, in seconds.
TRANSFER_S = 300.0
#: How long a stream that has a sign of life every 15 s may be silent, in seconds.
SILENCE_S = 45.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back, as far as parsing needs it."""

    status: int
    body: bytes


def never(value: object) -> bool:
    """Of answers that are never half done."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Message(Generic[T]):
    """One request, ready to be sent.

    Args:
        path: with its query, percent-encoded.
        parse: reads the answer; raises `BadAnswer`.
        answer_within_s: what the answer may rightly take.
        silence_s: how long one attempt waits for bytes.
        repeatable: whether it may be served twice without harm.
        final_codes: errors that are an answer, not an obstacle.
        also_ok: statuses beside 2xx that `parse` reads.
        last_event_id: the last event of a stream that is taken up again.
        call_ids: the calls it is about.
        unfinished: whether a value says that the service stopped before it was done, so that it is worth asking again.
    """

    method: str
    path: str
    parse: Callable[[Answer], T]
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON
    answer_within_s: float = PROMPT_S
    silence_s: float = PROMPT_S
    repeatable: bool = True
    final_codes: frozenset[str] = frozenset()
    also_ok: frozenset[int] = frozenset()
    last_event_id: str | None = None
    call_ids: tuple[str, ...] = ()
    unfinished: Callable[[T], bool] = never


def given(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Without what was left to the service."""
    return {name: value for name, value in asked.items() if value is not None}


def to_json(value: object) -> bytes:
    """A body.

    Raises:
        InvalidRequest: something in it is not JSON.
    """
    try:
        return _encoded(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {_around(error)!r} is not text in UTF-8") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def text_problem(value: object) -> str | None:
    """What in a JSON value is no text in UTF-8, in a sentence; None where nothing is. What is no JSON at all is not looked at here."""
    try:
        _encoded(value)
    except UnicodeEncodeError as error:
        return f"args: {_around(error)!r} is not text in UTF-8"
    except (TypeError, ValueError):
        return None
    return None


def _encoded(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _around(error: UnicodeEncodeError) -> str:
    """What is no text, with a little of what is beside it."""
    return error.object[max(0, error.start - 20) : error.end + 20]


def seconds(value: object, default_s: float) -> float:
    """A duration to wait for; what is no number is left for the service to refuse."""
    return max(0.0, float(value)) if isinstance(value, int | float) else default_s


def segment(value: str) -> str:
    """One part of a path.

    Raises:
        InvalidRequest: it is no text.
    """
    try:
        return quote(value, safe="")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"no request can ask for {_around(error)!r}: it is not text in UTF-8") from error


def path_of(route: str, /, **query: object) -> str:
    """A path with the part of the query that is given.

    Raises:
        InvalidRequest: some of that is no text.
    """
    asked = given(query)
    try:
        return f"{route}?{urlencode(asked, quote_via=quote)}" if asked else route
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"no request can ask for {_around(error)!r}: it is not text in UTF-8") from error


def decode(body: bytes | str) -> Any:
    """What a body says.

    Raises:
        BadAnswer: it is not JSON.
    """
    try:
        return json.loads(body)
    except ValueError as error:
        raise BadAnswer(f"the service sent what is not JSON: {body[:200]!r}") from error


def object_of(answer: Answer) -> dict[str, Any]:
    """The object that an answer must be."""
    document = decode(answer.body)
    if not isinstance(document, dict):
        raise BadAnswer(f"the service sent {type(document).__name__} where an object was due", status=answer.status)
    return document


def list_of(document: Mapping[str, Any], name: str) -> list[Any]:
    """The list that a member of an answer must be."""
    items = document.get(name)
    if not isinstance(items, list):
        raise BadAnswer(f"the service sent no list of {name}")
    return items


def nothing(answer: Answer) -> None:
    """An answer that carries nothing."""
    return

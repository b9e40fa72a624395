"""An HTTP request as a value, and the helpers that build requests and read responses. Nothing here does I/O."""

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
ASCIICAST = "application/x-asciicast"
BYTES = "application/octet-stream"

#: How long an ordinary response may take, in seconds.
DEFAULT_TIMEOUT_S = 30.0
#: How long a transfer may pause, and how long a listing or an unpacking may take, in seconds.
TRANSFER_TIMEOUT_S = 300.0
#: How long a stream may be silent, in seconds. The service sends a keep-alive on its streams every 15 s.
STREAM_READ_TIMEOUT_S = 45.0
#: How long the response to a call or an acquire may arrive after the deadline that the service was given, in seconds: time to end the processes of a
#: call, to report its result, and for the network.
DEADLINE_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class Response:
    """The parts of an HTTP response that parsing needs."""

    status: int
    body: bytes


def _never_unfinished(value: object) -> bool:
    """The default of `Message.is_unfinished`, for responses that are always complete."""
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Message(Generic[T]):
    """One HTTP request, and the function that parses its response.

    Every request of the contract is idempotent: calls and acquires carry keys, so that the service recognises a repeated one.

    Args:
        method: the HTTP method.
        path: the path with its query, percent-encoded.
        parse: turns the response into a value; raises `BadAnswer` for one that is not the contract's.
        body: the request body; None for a request without one, and for an upload, whose content is sent separately.
        content_type: the media type of the request body.
        accept: the media type of the response.
        response_timeout_s: how long the complete response may take, in seconds. Attempts within this time do not count against the retry budget.
        read_timeout_s: how long one attempt waits for the next bytes, in seconds.
        final_codes: error codes that are the result of this request and must not be retried.
        accepted_statuses: HTTP statuses besides 2xx whose responses `parse` reads.
        last_event_id: the id of the last event received, when a stream is resumed.
        call_ids: the ids of the tool calls in the request.
        is_unfinished: returns whether a parsed value says that the service stopped before it finished, so that sending the request again may help.
    """

    method: str
    path: str
    parse: Callable[[Response], T]
    body: bytes | None = None
    content_type: str = JSON
    accept: str = JSON
    response_timeout_s: float = DEFAULT_TIMEOUT_S
    read_timeout_s: float = DEFAULT_TIMEOUT_S
    final_codes: frozenset[str] = frozenset()
    accepted_statuses: frozenset[int] = frozenset()
    last_event_id: str | None = None
    call_ids: tuple[str, ...] = ()
    is_unfinished: Callable[[T], bool] = _never_unfinished


def without_none(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that are not None. The service uses its defaults for the others."""
    return {name: value for name, value in fields.items() if value is not None}


def encode_json(value: object) -> bytes:
    """Encode a request body as JSON.

    Raises:
        InvalidRequest: the value contains something that JSON cannot express.
    """
    try:
        return _encode_utf8_json(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {_invalid_excerpt(error)!r} is not text in UTF-8") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def measure_args(args: object) -> tuple[int, str | None]:
    """Return the size of the arguments of a tool call as JSON in bytes, and one sentence on why a service could not receive them, or None.

    Args:
        args: the arguments as a model wrote them: a number that JSON does not have, half of a surrogate pair and any depth are possible.

    Raises:
        InvalidRequest: the arguments contain an object that no model can have written, such as bytes.
    """
    try:
        return len(encode_json(args)), None
    except RecursionError:
        return 0, "args: the arguments are nested too deeply"
    except InvalidRequest as error:
        if isinstance(error.__cause__, TypeError):
            raise
        return 0, f"args: {error.detail}"


def _encode_utf8_json(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _invalid_excerpt(error: UnicodeEncodeError) -> str:
    """Return the characters that cannot be encoded, with up to 20 characters before and after them."""
    return error.object[max(0, error.start - 20) : error.end + 20]


def duration_or_default(value: object, default_s: float) -> float:
    """Return a duration in seconds, or the default if the value is not a number. The service refuses a wrong value."""
    return max(0.0, float(value)) if isinstance(value, int | float) else default_s


def quote_path_segment(value: str) -> str:
    """Percent-encode one segment of a URL path.

    Raises:
        InvalidRequest: the value cannot be encoded in UTF-8.
    """
    try:
        return quote(value, safe="")
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"no request can ask for {_invalid_excerpt(error)!r}: it is not text in UTF-8") from error


def path_with_query(path: str, /, **parameters: object) -> str:
    """Append query parameters to a path; parameters that are None are left out.

    Raises:
        InvalidRequest: a parameter cannot be encoded in UTF-8.
    """
    query = without_none(parameters)
    try:
        return f"{path}?{urlencode(query, quote_via=quote)}" if query else path
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"no request can ask for {_invalid_excerpt(error)!r}: it is not text in UTF-8") from error


def decode_json(body: bytes | str) -> Any:
    """Decode a JSON body.

    Raises:
        BadAnswer: the body is not JSON.
    """
    try:
        return json.loads(body)
    except ValueError as error:
        raise BadAnswer(f"the service sent what is not JSON: {body[:200]!r}") from error


def read_object(response: Response) -> dict[str, Any]:
    """Return the JSON object in a response.

    Raises:
        BadAnswer: the body is not a JSON object.
    """
    document = decode_json(response.body)
    if not isinstance(document, dict):
        raise BadAnswer(f"the service sent {type(document).__name__} instead of an object", status=response.status)
    return document


def read_list(document: Mapping[str, Any], name: str) -> list[Any]:
    """Return the list that a member of a JSON object must be.

    Raises:
        BadAnswer: the member is missing or is not a list.
    """
    items = document.get(name)
    if not isinstance(items, list):
        raise BadAnswer(f"the service sent no list of {name}")
    return items


def ignore_body(response: Response) -> None:
    """Parse a response that carries no value."""
    return

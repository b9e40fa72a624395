"""Building HTTP requests and reading HTTP responses for both senders. Nothing here does I/O."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import TypeVar

import httpx

from env_client._version import __version__
from env_client.discovery import Endpoint
from env_client.errors import (
    BadAnswer,
    ClientClosed,
    ConnectFailed,
    ConnectionLost,
    InvalidRequest,
    SandboxError,
    TimedOut,
    TransportError,
    error_from_response,
)
from env_client.messages.message import Message, Response
from env_client.retry import CallUnfinished, RetryPolicy
from env_client.transport.resumable_streams import ResumableStream, StreamLoop
from env_client.transport.retry_budget import CONNECT_TIMEOUT_S, ConnectionState, RetryBudget, RetryLoop
from env_client.transport.uploads import Upload

T = TypeVar("T")


class RequestCore:
    """The part that the asynchronous and the blocking sender share: building requests, reading responses, deciding on retries.

    Args:
        endpoint: the address of the service and the token.
        policy: the retry policy.
        clock: returns monotonic seconds.
        jitter: returns random numbers from 0 to 1.
        state: what the client knows about the service, if it is shared with another sender of the same client.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        policy: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        state: ConnectionState | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.clock = clock
        self._jitter = jitter
        self.state = state or ConnectionState(endpoint.url, clock)
        self._headers = [(b"Host", httpx.URL(endpoint.url).netloc), (b"User-Agent", f"sandbox-pool/{__version__}".encode())]
        if endpoint.token:
            self._headers.append((b"Authorization", b"Bearer " + endpoint.token.encode("latin-1", "replace")))
        # Parsing a URL takes longer than the rest of building a request.
        self._cached_url = functools.lru_cache(maxsize=4096)(self._parse_url)

    def _parse_url(self, path: str) -> httpx.URL:
        return httpx.URL(self.endpoint.url + path)

    def check_open(self) -> None:
        """Check that the client is not closed.

        Raises:
            ClientClosed: the client was closed.
        """
        if self.state.client_closed:
            raise ClientClosed

    def build_request(
        self, message: Message[T], content: bytes | Iterator[bytes] | AsyncIterator[bytes] | None = None, size_bytes: int | None = None
    ) -> httpx.Request:
        """Build the HTTP request for a message.

        Args:
            message: the message to send.
            content: the content of an upload; default the body of the message.
            size_bytes: the size of the upload, if known.

        Raises:
            ClientClosed: the client was closed.
        """
        self.check_open()
        headers = [*self._headers, (b"Accept", message.accept.encode())]
        if message.last_event_id is not None:
            headers.append((b"Last-Event-ID", message.last_event_id.encode("latin-1", "replace")))
        body = message.body if content is None else content
        if body is not None:
            headers.append((b"Content-Type", message.content_type.encode()))
        if isinstance(body, bytes):
            size_bytes = len(body)
        if size_bytes is not None:
            headers.append((b"Content-Length", b"%d" % size_bytes))
        read_timeout_s = message.read_timeout_s
        timeout = {"connect": CONNECT_TIMEOUT_S, "read": read_timeout_s, "write": read_timeout_s, "pool": read_timeout_s}
        return httpx.Request(message.method, self._cached_url(message.path), headers=headers, content=body, extensions={"timeout": timeout})

    def parse_response(self, message: Message[T], response: httpx.Response, body: bytes) -> T:
        """Return the value in a response.

        Raises:
            CallUnfinished: the service stopped before a call of the message ended.
            SandboxError: the response is an error, or is not the contract's.
        """
        self.raise_for_error(message, response, body)
        value = message.parse(Response(response.status_code, body))
        if message.is_unfinished(value):
            raise CallUnfinished(value)
        return value

    def record_response(self, message: Message[T], response: httpx.Response) -> bool:
        """Record that the service has responded; return whether the `parse` function of the message can read the response."""
        self.state.record_response()
        return 200 <= response.status_code < 300 or response.status_code in message.accepted_statuses

    def raise_for_error(self, message: Message[T], response: httpx.Response, body: bytes) -> None:
        """Raise the error in a response that is not a success.

        Raises:
            SandboxError: the response is an error.
        """
        if not self.record_response(message, response):
            raise error_from_response(response.status_code, response.headers, body)

    def error_from_httpx(self, message: Message[T], error: httpx.RequestError | httpx.StreamError) -> SandboxError:
        """Translate an error of httpx into an error of this client."""
        request = f"{message.method} {self.endpoint.url}{message.path.partition('?')[0]}"
        reason = f": {error}" if str(error) else ""
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout() | httpx.ProxyError():
                return ConnectFailed(f"no connection for {request}; is the service running?{reason}")
            case httpx.TimeoutException():
                return TimedOut(f"no data came for {message.read_timeout_s:g} s in response to {request}")
            case httpx.LocalProtocolError() | httpx.UnsupportedProtocol():
                return InvalidRequest(f"{request} cannot be sent{reason}")
            case httpx.DecodingError():
                return BadAnswer(f"the response to {request} cannot be decoded{reason}")
            case _:
                return ConnectionLost(f"the connection ended during {request}{reason}")

    def new_retry_loop(self, message: Message[T], upload: Upload | None = None) -> RetryLoop[T]:
        """Create the retry loop of one request.

        Args:
            message: the message to send.
            upload: the content that is sent with it, if any.
        """
        return RetryLoop(message, self._new_retry_budget(), lambda: upload is None or upload.rewindable)

    def new_stream_loop(self, stream: ResumableStream[T]) -> StreamLoop[T]:
        """Create the loop that follows one stream."""
        return StreamLoop(stream, self._new_retry_budget())

    def _new_retry_budget(self) -> RetryBudget:
        return RetryBudget(self.policy, self.state, self.clock, self._jitter)

    def record_failure(self, error: SandboxError) -> None:
        """Record a failure for a caller that repeats its requests itself and does not use the retry loop."""
        if isinstance(error, TransportError):
            self.state.record_no_response(error)

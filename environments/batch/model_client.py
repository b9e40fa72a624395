"""The client of an OpenAI-compatible model server, with a bounded number of retries."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any, Self

import httpx

from env_client.transport.connections import async_connections
from environments.batch.failures import RunStopped

#: The first and the longest delay before a request is repeated, in seconds.
RETRY_DELAYS_S = (0.5, 15.0)
#: The longest delay that a server may ask for with `Retry-After`, in seconds.
MAX_RETRY_AFTER_S = 120.0
CONNECT_TIMEOUT_S = 10.0
#: The longest response that is read, in bytes.
MAX_RESPONSE_BYTES = 64 << 20
_TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
#: The statuses that every request would get: the key, the address or the model is wrong.
_FINAL_STATUSES = frozenset({401, 403, 404, 405})


class PromptRefused(Exception):
    """The model server does not accept the request of one prompt, for example because it is too long. Another attempt would be refused, too."""


class ModelFault(Exception):
    """The model server failed for one prompt, while it answered others."""


class ModelUnavailable(RunStopped):
    """The model server does not answer, or refuses every request."""


class _Unanswered(Exception):
    """One request got no answer; it may be repeated.

    Args:
        problem: what happened.
        retry_after_s: after how many seconds the server asked to be tried again.
        is_response: whether the server accepted the request, and responded with what is no answer.
    """

    def __init__(self, problem: str, retry_after_s: float | None = None, *, is_response: bool = False) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s
        self.is_response = is_response


class ModelClient:
    """Sends chat completions to a model server.

    Args:
        base_url: the address of the server, which `/chat/completions` is appended to.
        api_key: the key; empty for none.
        model: the name of the model.
        timeout_s: how long one answer may take, in seconds.
        retries: how often a request is repeated.
        max_connections: how many requests may be in flight.
        sleep: waits; replaced in tests.
    """

    def __init__(
        self,
        *,
        base_url: str,
        api_key: str,
        model: str,
        timeout_s: float,
        retries: int,
        max_connections: int,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._model = model
        self._retries = retries
        self._sleep = sleep
        self._last_answer_s = float("-inf")
        self._headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        self._timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S).as_dict()
        # Requests go to the connections directly: what httpx.AsyncClient adds, such as cookies and redirects, costs as much time as the request itself.
        self._connections = async_connections(httpx.URL(self._url), max_connections)

    async def chat_completion(self, **request: Any) -> Any:
        """Answer a conversation; `request` has the members of a chat completion.

        Raises:
            PromptRefused: the server refuses this request.
            ModelFault: the server failed for this request, again and again, while it answered others.
            ModelUnavailable: the server does not answer, or refuses every request.
        """
        began_s = time.monotonic()
        for attempt in range(self._retries + 1):
            try:
                return await self._send(request)
            except _Unanswered as error:
                problem = error
            if attempt < self._retries:
                await self._sleep(_delay_s(attempt, problem.retry_after_s))
        tried = f"{self._retries + 1} requests in {time.monotonic() - began_s:.0f} s"
        # A server that accepts requests is there: one prompt whose responses cannot be used must not end the run, which a resumed run would meet again.
        if problem.is_response or self._last_answer_s > began_s:
            raise ModelFault(f"the model server at {self._url} failed ({tried}): {problem}")
        next_step = "start it, or set --base_url or OPENAI_BASE_URL to its address"
        raise ModelUnavailable(f"the model server at {self._url} does not answer ({tried}): {problem}", next_step) from problem

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connections.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    async def _send(self, request: dict[str, Any]) -> Any:
        try:
            # ASCII, because a prompt or an answer may hold half of a surrogate pair, which UTF-8 cannot express.
            body = json.dumps({"model": self._model, **request}).encode("ascii")
            message = httpx.Request("POST", self._url, headers=self._headers, content=body, extensions={"timeout": self._timeout})
            response = await self._connections.handle_async_request(message)
            try:
                content = await _read_bounded(response)
            finally:
                await response.aclose()
        except httpx.TransportError as error:
            raise _Unanswered(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        if response.status_code in _FINAL_STATUSES:
            next_step = "check --base_url, --model and --api_key"
            raise ModelUnavailable(f"the model server at {self._url} refuses the requests: {_describe(response, content)}", next_step)
        if response.status_code in _TRANSIENT_STATUSES or response.status_code >= 500:
            raise _Unanswered(_describe(response, content), _retry_after_s(response))
        if response.status_code >= 300:
            self._last_answer_s = time.monotonic()
            raise PromptRefused(f"the model server refused the request: {_describe(response, content)}")
        return self._answer(content)

    def _answer(self, content: bytes) -> Any:
        try:
            document = json.loads(content)
            is_answer = isinstance(document["choices"][0]["message"], dict)
        except (ValueError, LookupError, TypeError, RecursionError):
            is_answer = False
        if not is_answer:
            raise _Unanswered(f"its response is no chat completion: {content[:200].decode(errors='replace')!r}", is_response=True)
        self._last_answer_s = time.monotonic()
        return document


async def _read_bounded(response: httpx.Response) -> bytes:
    """Read a response.

    Raises:
        _Unanswered: it is longer than `MAX_RESPONSE_BYTES`.
    """
    content = bytearray()
    async for chunk in response.aiter_bytes():
        content += chunk
        if len(content) > MAX_RESPONSE_BYTES:
            raise _Unanswered(f"its response is longer than {MAX_RESPONSE_BYTES} bytes", is_response=True)
    return bytes(content)


def _describe(response: httpx.Response, content: bytes) -> str:
    return f"HTTP {response.status_code}: {content[:1200].decode(errors='replace')[:300].strip()}".rstrip(": ")


def _retry_after_s(response: httpx.Response) -> float | None:
    try:
        return min(MAX_RETRY_AFTER_S, max(0.0, float(response.headers["retry-after"])))
    except (KeyError, ValueError):  # none, or a date, which model servers do not send
        return None


def _delay_s(attempt: int, retry_after_s: float | None) -> float:
    first_s, longest_s = RETRY_DELAYS_S
    delay_s = min(longest_s, first_s * 2.0**attempt) * random.uniform(0.5, 1.0)
    return delay_s if retry_after_s is None else max(delay_s, retry_after_s)

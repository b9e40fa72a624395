"""Notices that the model server has gone away while rollouts wait for its answers, which its client would only notice after many retries."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from environments.model_access.model_probe import find_connection_problem

V = TypeVar("V")

#: The time between two checks while an answer is awaited, in seconds. All rollouts share them.
CHECK_INTERVAL_S = 3.0


class ModelServerGone(Exception):
    """Nothing accepts connections at the address of the model server any more. The message is one sentence."""


class ModelServerWatch:
    """Checks now and then, while answers are awaited, whether the model server still accepts connections.

    Args:
        base_url: the address of the model server.
        max_down_s: after so many seconds without a connection the model server counts as gone.
        interval_s: the longest time between two checks, in seconds.
        find_problem: returns why no connection can be made to an address, or None.
    """

    def __init__(
        self,
        base_url: str,
        max_down_s: float,
        *,
        interval_s: float = CHECK_INTERVAL_S,
        find_problem: Callable[[str], Awaitable[str | None]] = find_connection_problem,
    ) -> None:
        self._base_url = base_url
        self._max_down_s = max_down_s
        self._interval_s = min(interval_s, max_down_s / 2)
        self._find_problem = find_problem
        self._checking = asyncio.Lock()
        self._checked_s = 0.0
        self._down_since_s: float | None = None
        self._problem = ""

    async def wait_for_answer(self, request: Coroutine[Any, Any, V]) -> V:
        """Return the answer of the model server to a request, or raise the error of the request.

        Args:
            request: asks the model server. It is cancelled when the model server is gone.

        Raises:
            ModelServerGone: the model server has accepted no connection for `max_down_s`.
        """
        task = asyncio.ensure_future(request)
        try:
            while not (await asyncio.wait({task}, timeout=self._interval_s))[0]:
                await self._check()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _check(self) -> None:
        async with self._checking:
            if time.monotonic() - self._checked_s >= self._interval_s:
                self._problem = await self._find_problem(self._base_url) or ""
                self._checked_s = time.monotonic()
                if not self._problem:
                    self._down_since_s = None
                elif self._down_since_s is None:
                    self._down_since_s = self._checked_s
        down_s = 0.0 if self._down_since_s is None else time.monotonic() - self._down_since_s
        if self._problem and down_s >= self._max_down_s:
            problem = f"the model server at {self._base_url} has accepted no connection for {down_s:.0f} s: {self._problem}"
            raise ModelServerGone(f"{problem}; start it, and the run again")


class WatchedModel:
    """A chat server whose answers are awaited only as long as it is there.

    Args:
        server: the chat server.
        watch: notices that it is gone.
    """

    def __init__(self, server: Any, watch: ModelServerWatch) -> None:
        self._server = server
        self._watch = watch

    async def chat_completion(self, **request: Any) -> Any:
        """Answer a conversation; see `ChatServer`."""
        return await self._watch.wait_for_answer(self._server.chat_completion(**request))


class WatchedManagedModel(WatchedModel):
    """The same, for a server that keeps the tokens of the conversation."""

    def get_state(self) -> Mapping[str, Any]:
        """Return the sequences of tokens so far."""
        state: Mapping[str, Any] = self._server.get_state()
        return state

"""The two senders: a message goes out, is repeated where that is safe, and its answer comes back. The only I/O of the client's verbs."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import httpx

from env_client._version import __version__
from env_client.discovery import Endpoint
from env_client.errors import (
    BadAnswer,
    ClientClosed,
    ConnectFailed,
    ConnectionLost,
    Draining,
    InvalidRequest,
    SandboxError,
    TimedOut,
    TransportError,
    error_of_answer,
)
from env_client.messages.message import Answer, Message
from env_client.retry import RetryPolicy, Unfinished
from env_client.transport.progress import Progress
from env_client.transport.retry_budget import CONNECT_S, Contact, RetryBudget
from env_client.transport.uploads import Upload

T = TypeVar("T")
R = TypeVar("R")


class Sender:
    """What both senders share: building requests, reading answers, deciding on repeats. No I/O.

    Args:
        endpoint: where to, and the token.
        policy: how patient to be.
        clock: monotonic seconds.
        unit: random numbers from 0 to 1.
        contact: what another sender of the same client knows too; default one of its own.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        policy: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
        unit: Callable[[], float] = random.random,
        contact: Contact | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.policy = policy
        self.clock = clock
        self._unit = unit
        self.contact = contact or Contact(endpoint.url, clock)
        self._headers = [(b"Host", httpx.URL(endpoint.url).netloc), (b"User-Agent", f"sandbox-pool/{__version__}".encode())]
        if endpoint.token:
            self._headers.append((b"Authorization", b"Bearer " + endpoint.token.encode("latin-1", "replace")))
        # Parsing a URL takes longer than the rest of building a request.
        self._url = functools.lru_cache(maxsize=4096)(self._parse_url)

    def _parse_url(self, path: str) -> httpx.URL:
        return httpx.URL(self.endpoint.url + path)

    def check_open(self) -> None:
        """Refuse to go on without connections.

        Raises:
            ClientClosed: they were closed.
        """
        if self.contact.closed:
            raise ClientClosed

    def build(self, message: Message[T], content: bytes | Iterator[bytes] | AsyncIterator[bytes] | None = None, size_bytes: int | None = None) -> httpx.Request:
        """The request of a message.

        Args:
            message: what to send.
            content: an upload's bytes; default the message's own body.
            size_bytes: the upload's size, if known.

        Raises:
            ClientClosed: there are no connections any longer.
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
        silence_s = message.silence_s
        timeout = {"connect": CONNECT_S, "read": silence_s, "write": silence_s, "pool": silence_s}
        return httpx.Request(message.method, self._url(message.path), headers=headers, content=body, extensions={"timeout": timeout})

    def read(self, message: Message[T], response: httpx.Response, body: bytes) -> T:
        """The value that an answer carries.

        Raises:
            SandboxError: the answer is an error, or not the contract's.
        """
        self.check(message, response, body)
        value = message.parse(Answer(response.status_code, body))
        if message.unfinished(value):
            raise Unfinished(value)
        return value

    def succeeded(self, message: Message[T], response: httpx.Response) -> bool:
        """Whether an answer is one that the message's `parse` reads."""
        self.contact.over()
        return 200 <= response.status_code < 300 or response.status_code in message.also_ok

    def check(self, message: Message[T], response: httpx.Response, body: bytes) -> None:
        """Raise what an answer that is no success means."""
        if not self.succeeded(message, response):
            raise error_of_answer(response.status_code, response.headers, body)

    def foreign(self, message: Message[T], error: httpx.RequestError | httpx.StreamError) -> SandboxError:
        """Our error for one of httpx."""
        what = f"{message.method} {self.endpoint.url}{message.path.partition('?')[0]}"
        told = f": {error}" if str(error) else ""
        match error:
            case httpx.ConnectError() | httpx.ConnectTimeout() | httpx.PoolTimeout() | httpx.ProxyError():
                return ConnectFailed(f"no connection for {what}; is the service running?{told}")
            case httpx.TimeoutException():
                return TimedOut(f"nothing came for {message.silence_s:g} s in answer to {what}")
            case httpx.LocalProtocolError() | httpx.UnsupportedProtocol():
                return InvalidRequest(f"{what} cannot be sent{told}")
            case httpx.DecodingError():
                return BadAnswer(f"the answer to {what} cannot be decoded{told}")
            case _:
                return ConnectionLost(f"the connection ended during {what}{told}")

    def patience(self) -> RetryBudget:
        """What one request has of this client's patience."""
        return RetryBudget(self.policy, self.contact, self.clock, self._unit)

    def unanswered(self, error: SandboxError) -> None:
        """Somebody who repeats a request by himself got no answer."""
        if isinstance(error, TransportError):
            self.contact.begins(error)

    def known(self, error: SandboxError, unfinished: Unfinished | None) -> Any:
        """What a request comes to that is given up: the answer of a service that stopped, if there was one and none came after it.

        Raises:
            SandboxError: the last error.
        """
        if unfinished is not None and (error is unfinished or isinstance(error, TransportError | Draining)):
            return unfinished.value
        raise error


class AsyncSender:
    """Sends messages over an httpx transport.

    Args:
        core: builds and decides.
        transport: carries.
        sleep: waits between attempts.
    """

    def __init__(self, core: Sender, transport: httpx.AsyncBaseTransport, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.core = core
        self.transport = transport
        self._sleep = sleep

    async def send(self, message: Message[T], upload: Upload | None = None) -> T:
        """Send a message and read its answer, repeating it where that is safe.

        Raises:
            SandboxError: what the last attempt came to.
        """

        async def attempt() -> T:
            async with self._exchange(message, upload) as response:
                return self.core.read(message, response, await response.aread())

        return await self._repeat(message, attempt, upload)

    async def stream(self, message: Message[T]) -> AsyncIterator[bytes]:
        """The body of an answer as it comes. Repeated only until it begins."""
        async with AsyncExitStack() as stack:
            chunks = await self._repeat(message, lambda: stack.enter_async_context(self._open(message)))
            async for chunk in chunks:
                yield chunk

    async def save(self, message: Message[T], target: Path) -> int:
        """Write an answer's body to a file, which is there only when it is whole. Returns its size in bytes."""

        async def attempt() -> int:
            size_bytes = 0
            with replacing(target) as file:
                async with self._open(message) as chunks:
                    async for chunk in chunks:
                        size_bytes += await asyncio.to_thread(file.write, chunk)
            return size_bytes

        return await self._repeat(message, attempt)

    async def follow(self, progress: Progress[R]) -> AsyncIterator[R]:
        """A stream as it comes; a cut connection is taken up again with what is still missing, patiently as long as anything comes."""
        patience = self.core.patience()
        while not progress.done:
            message = progress.message()
            patience.begin()
            try:
                async with self._open(message) as chunks:
                    async for chunk in chunks:
                        patience.alive()
                        for took in progress.feed(chunk):
                            patience.moved()
                            yield took
                progress.ended()
            except SandboxError as error:
                wait_s = patience.wait_s(message, error)
                if wait_s is not None:
                    await self._sleep(wait_s)
                    continue
                for known in progress.give_up():
                    yield known
                if not progress.done:
                    raise

    async def aclose(self) -> None:
        """Close the connections."""
        self.core.contact.closed = True
        await self.transport.aclose()

    async def _repeat(self, message: Message[T], attempt_once: Callable[[], Awaitable[R]], upload: Upload | None = None) -> R:
        patience, unfinished = self.core.patience(), None
        while True:
            patience.begin()
            try:
                return await attempt_once()
            except SandboxError as error:
                unfinished = error if isinstance(error, Unfinished) else unfinished
                wait_s = patience.wait_s(message, error, upload is None or upload.rewindable)
                if wait_s is None:
                    known: R = self.core.known(error, unfinished)
                    return known
            await self._sleep(wait_s)

    @asynccontextmanager
    async def _open(self, message: Message[T]) -> AsyncIterator[AsyncIterator[bytes]]:
        async with self._exchange(message) as response:
            if not self.core.succeeded(message, response):
                self.core.check(message, response, await response.aread())
            yield response.aiter_bytes()

    @asynccontextmanager
    async def _exchange(self, message: Message[T], upload: Upload | None = None) -> AsyncIterator[httpx.Response]:
        request = self.core.build(message) if upload is None else self.core.build(message, upload.achunks(), upload.size_bytes)
        try:
            response = await self.transport.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        except (httpx.RequestError, httpx.StreamError) as error:
            raise self.core.foreign(message, error) from error


class SyncSender:
    """As `AsyncSender`, for any number of threads."""

    def __init__(self, core: Sender, transport: httpx.BaseTransport, sleep: Callable[[float], None] = time.sleep) -> None:
        self.core = core
        self.transport = transport
        self._sleep = sleep

    def send(self, message: Message[T], upload: Upload | None = None) -> T:
        """As `AsyncSender.send`."""

        def attempt() -> T:
            with self._exchange(message, upload) as response:
                return self.core.read(message, response, response.read())

        return self._repeat(message, attempt, upload)

    def stream(self, message: Message[T]) -> Iterator[bytes]:
        """As `AsyncSender.stream`."""
        with ExitStack() as stack:
            yield from self._repeat(message, lambda: stack.enter_context(self._open(message)))

    def save(self, message: Message[T], target: Path) -> int:
        """As `AsyncSender.save`."""

        def attempt() -> int:
            with replacing(target) as file, self._open(message) as chunks:
                return sum(file.write(chunk) for chunk in chunks)

        return self._repeat(message, attempt)

    def follow(self, progress: Progress[R]) -> Iterator[R]:
        """As `AsyncSender.follow`."""
        patience = self.core.patience()
        while not progress.done:
            message = progress.message()
            patience.begin()
            try:
                with self._open(message) as chunks:
                    for chunk in chunks:
                        patience.alive()
                        for took in progress.feed(chunk):
                            patience.moved()
                            yield took
                progress.ended()
            except SandboxError as error:
                wait_s = patience.wait_s(message, error)
                if wait_s is not None:
                    self._sleep(wait_s)
                    continue
                yield from progress.give_up()
                if not progress.done:
                    raise

    def close(self) -> None:
        """Close the connections."""
        self.core.contact.closed = True
        self.transport.close()

    def _repeat(self, message: Message[T], attempt_once: Callable[[], R], upload: Upload | None = None) -> R:
        patience, unfinished = self.core.patience(), None
        while True:
            patience.begin()
            try:
                return attempt_once()
            except SandboxError as error:
                unfinished = error if isinstance(error, Unfinished) else unfinished
                wait_s = patience.wait_s(message, error, upload is None or upload.rewindable)
                if wait_s is None:
                    known: R = self.core.known(error, unfinished)
                    return known
            self._sleep(wait_s)

    @contextmanager
    def _open(self, message: Message[T]) -> Iterator[Iterator[bytes]]:
        with self._exchange(message) as response:
            if not self.core.succeeded(message, response):
                self.core.check(message, response, response.read())
            yield response.iter_bytes()

    @contextmanager
    def _exchange(self, message: Message[T], upload: Upload | None = None) -> Iterator[httpx.Response]:
        request = self.core.build(message) if upload is None else self.core.build(message, upload.chunks(), upload.size_bytes)
        try:
            response = self.transport.handle_request(request)
            try:
                yield response
            finally:
                response.close()
        except (httpx.RequestError, httpx.StreamError) as error:
            raise self.core.foreign(message, error) from error


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `target` when the block ends well, and is gone when it does not."""
    partial = target.with_name(f".{target.name}.{secrets.token_hex(6)}")
    with open(partial, "xb") as file:
        try:
            yield file
            file.flush()
            os.replace(partial, target)
        except BaseException:
            os.unlink(partial)
            raise

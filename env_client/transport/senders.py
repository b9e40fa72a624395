"""The asynchronous and the blocking sender. They do all I/O of the requests: they send a message, repeat it where that is safe, and read the response."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar

import httpx

from env_client.errors import SandboxError
from env_client.messages.message import Message
from env_client.transport.downloads import replace_when_complete
from env_client.transport.request_core import RequestCore
from env_client.transport.resumable_streams import ResumableStream
from env_client.transport.retry_budget import RetryLoop
from env_client.transport.uploads import Upload

T = TypeVar("T")
R = TypeVar("R")


class AsyncSender:
    """Sends messages over an asynchronous httpx transport.

    Args:
        core: builds requests, reads responses and decides on retries.
        transport: carries the requests.
        sleep: waits between attempts, for a number of seconds.
    """

    def __init__(self, core: RequestCore, transport: httpx.AsyncBaseTransport, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self.core = core
        self.transport = transport
        self._sleep = sleep

    async def send(self, message: Message[T], upload: Upload | None = None) -> T:
        """Send a message and return the value in its response. The message is repeated where that is safe.

        Raises:
            SandboxError: the error of the last attempt.
        """

        async def attempt() -> T:
            async with self._exchange(message, upload) as response:
                return self.core.parse_response(message, response, await response.aread())

        return await self._retry(self.core.new_retry_loop(message, upload), attempt)

    async def stream(self, message: Message[T]) -> AsyncIterator[bytes]:
        """Yield the body of a response as it arrives. The message is repeated only until the body begins."""
        async with AsyncExitStack() as stack:
            chunks = await self._retry(self.core.new_retry_loop(message), lambda: stack.enter_async_context(self._open_body(message)))
            async for chunk in chunks:
                yield chunk

    async def save(self, message: Message[T], target: Path) -> int:
        """Write the body of a response to a file, which is replaced once the body is complete. Returns the size in bytes."""

        async def attempt() -> int:
            size_bytes = 0
            with replace_when_complete(target) as file:
                async with self._open_body(message) as chunks:
                    async for chunk in chunks:
                        size_bytes += await asyncio.to_thread(file.write, chunk)
            return size_bytes

        return await self._retry(self.core.new_retry_loop(message), attempt)

    async def follow(self, stream: ResumableStream[R]) -> AsyncIterator[R]:
        """Yield the items of a stream as they arrive. After a lost connection, a new request asks for what is missing.

        Whenever data arrives, the retry budget is restored.
        """
        loop = self.core.new_stream_loop(stream)
        while not stream.done:
            message = loop.start_attempt()
            try:
                async with self._open_body(message) as chunks:
                    async for chunk in chunks:
                        for item in loop.feed(chunk):
                            yield item
                stream.end_of_body()
            except SandboxError as error:
                delay_s = loop.delay_before_retry_s(error)
                if delay_s is not None:
                    await self._sleep(delay_s)
                    continue
                for item in stream.unfinished_items():
                    yield item
                if not stream.done:
                    raise

    async def aclose(self) -> None:
        """Close the connections. Every later request raises `ClientClosed`."""
        self.core.state.client_closed = True
        await self.transport.aclose()

    async def _retry(self, loop: RetryLoop[T], attempt: Callable[[], Awaitable[R]]) -> R:
        while True:
            loop.start_attempt()
            try:
                return await attempt()
            except SandboxError as error:
                delay_s = loop.delay_before_retry_s(error)
                if delay_s is None:
                    value: R = loop.final_value(error)
                    return value
            await self._sleep(delay_s)

    @asynccontextmanager
    async def _open_body(self, message: Message[T]) -> AsyncIterator[AsyncIterator[bytes]]:
        """Send a message and give the chunks of the response body."""
        async with self._exchange(message) as response:
            if not self.core.record_response(message, response):
                self.core.raise_for_error(message, response, await response.aread())
            yield response.aiter_bytes()

    @asynccontextmanager
    async def _exchange(self, message: Message[T], upload: Upload | None = None) -> AsyncIterator[httpx.Response]:
        """Send a message and give the response, whose body has not been read."""
        request = self.core.build_request(message) if upload is None else self.core.build_request(message, upload.read_async_chunks(), upload.size_bytes)
        try:
            response = await self.transport.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        except (httpx.RequestError, httpx.StreamError) as error:
            raise self.core.error_from_httpx(message, error) from error


class SyncSender:
    """The blocking counterpart of `AsyncSender`, for use by any number of threads."""

    def __init__(self, core: RequestCore, transport: httpx.BaseTransport, sleep: Callable[[float], None] = time.sleep) -> None:
        self.core = core
        self.transport = transport
        self._sleep = sleep

    def send(self, message: Message[T], upload: Upload | None = None) -> T:
        """See `AsyncSender.send`."""

        def attempt() -> T:
            with self._exchange(message, upload) as response:
                return self.core.parse_response(message, response, response.read())

        return self._retry(self.core.new_retry_loop(message, upload), attempt)

    def stream(self, message: Message[T]) -> Iterator[bytes]:
        """See `AsyncSender.stream`."""
        with ExitStack() as stack:
            yield from self._retry(self.core.new_retry_loop(message), lambda: stack.enter_context(self._open_body(message)))

    def save(self, message: Message[T], target: Path) -> int:
        """See `AsyncSender.save`."""

        def attempt() -> int:
            with replace_when_complete(target) as file, self._open_body(message) as chunks:
                return sum(file.write(chunk) for chunk in chunks)

        return self._retry(self.core.new_retry_loop(message), attempt)

    def follow(self, stream: ResumableStream[R]) -> Iterator[R]:
        """See `AsyncSender.follow`."""
        loop = self.core.new_stream_loop(stream)
        while not stream.done:
            message = loop.start_attempt()
            try:
                with self._open_body(message) as chunks:
                    for chunk in chunks:
                        yield from loop.feed(chunk)
                stream.end_of_body()
            except SandboxError as error:
                delay_s = loop.delay_before_retry_s(error)
                if delay_s is not None:
                    self._sleep(delay_s)
                    continue
                yield from stream.unfinished_items()
                if not stream.done:
                    raise

    def close(self) -> None:
        """See `AsyncSender.aclose`."""
        self.core.state.client_closed = True
        self.transport.close()

    def _retry(self, loop: RetryLoop[T], attempt: Callable[[], R]) -> R:
        while True:
            loop.start_attempt()
            try:
                return attempt()
            except SandboxError as error:
                delay_s = loop.delay_before_retry_s(error)
                if delay_s is None:
                    value: R = loop.final_value(error)
                    return value
            self._sleep(delay_s)

    @contextmanager
    def _open_body(self, message: Message[T]) -> Iterator[Iterator[bytes]]:
        """See `AsyncSender._open_body`."""
        with self._exchange(message) as response:
            if not self.core.record_response(message, response):
                self.core.raise_for_error(message, response, response.read())
            yield response.iter_bytes()

    @contextmanager
    def _exchange(self, message: Message[T], upload: Upload | None = None) -> Iterator[httpx.Response]:
        """See `AsyncSender._exchange`."""
        request = self.core.build_request(message) if upload is None else self.core.build_request(message, upload.read_chunks(), upload.size_bytes)
        try:
            response = self.transport.handle_request(request)
            try:
                yield response
            finally:
                response.close()
        except (httpx.RequestError, httpx.StreamError) as error:
            raise self.core.error_from_httpx(message, error) from error

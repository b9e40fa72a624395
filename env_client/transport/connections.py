"""Connections for thousands of rollouts.

httpx's own pool walks all its connections for every request: with 64 requests at a time that costs four times what the request
itself does, and with some hundred idle connections many milliseconds. So each connection lives in a transport of its own, and the
idle ones in a stack: whatever their number, a request pops one and pushes it back.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import threading
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import cast

import httpx

#: How long an idle connection is used again, in seconds.
KEEPALIVE_S = 60.0
#: Idle connections beyond this number are closed.
MAX_IDLE = 256
#: A transport of its own for each connection: requests on it never wait for each other, since it is lent to one at a time.
_ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)


def default_max_connections() -> int:
    """As many as a large job needs, within half of the files that this process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1000 if soft == resource.RLIM_INFINITY else max(8, min(1000, soft // 2))


def environment_proxy(url: httpx.URL) -> str | None:
    """The proxy that the environment names for a URL (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY; NO_PROXY and loopback go direct)."""
    if url.host in {"localhost", "127.0.0.1", "::1"} or urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


def async_connections(url: httpx.URL, max_connections: int) -> AsyncConnections:
    """The connections of an `AsyncSandboxClient` to one service."""
    tls, proxy = _tls(url), environment_proxy(url)
    return AsyncConnections(lambda: httpx.AsyncHTTPTransport(verify=tls, proxy=proxy, limits=_ONE), max_connections)


def sync_connections(url: httpx.URL, max_connections: int) -> Connections:
    """The connections of a `SandboxClient` to one service."""
    tls, proxy = _tls(url), environment_proxy(url)
    return Connections(lambda: httpx.HTTPTransport(verify=tls, proxy=proxy, limits=_ONE), max_connections)


class AsyncConnections(httpx.AsyncBaseTransport):
    """A transport that lends each request a transport with one connection.

    Args:
        make: makes such a transport; it connects by itself, again too when its connection has gone stale.
        max_connections: how many requests may be under way; more wait their turn.
    """

    def __init__(self, make: Callable[[], httpx.AsyncBaseTransport], max_connections: int) -> None:
        self._make = make
        self._idle: list[httpx.AsyncBaseTransport] = []
        self._turns = asyncio.Semaphore(max_connections)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the connection is busy until the response is closed."""
        await self._turns.acquire()
        try:
            transport = self._idle.pop() if self._idle else self._make()
            try:
                response = await transport.handle_async_request(request)
            except BaseException:  # what state a failed or cancelled request leaves behind is anybody's guess
                await transport.aclose()
                raise
        except BaseException:
            self._turns.release()
            raise
        response.stream = _AsyncLent(cast(httpx.AsyncByteStream, response.stream), transport, self._take_back)
        return response

    async def _take_back(self, transport: httpx.AsyncBaseTransport, well: bool) -> None:
        keep = well and len(self._idle) < MAX_IDLE
        if keep:
            self._idle.append(transport)
        self._turns.release()
        if not keep:
            await transport.aclose()

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop().aclose()


class Connections(httpx.BaseTransport):
    """As `AsyncConnections`, for any number of threads."""

    def __init__(self, make: Callable[[], httpx.BaseTransport], max_connections: int) -> None:
        self._make = make
        self._idle: list[httpx.BaseTransport] = []
        self._turns = threading.Semaphore(max_connections)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request; the connection is busy until the response is closed."""
        self._turns.acquire()
        try:
            transport = self._pop()
            try:
                response = transport.handle_request(request)
            except BaseException:
                transport.close()
                raise
        except BaseException:
            self._turns.release()
            raise
        response.stream = _Lent(cast(httpx.SyncByteStream, response.stream), transport, self._take_back)
        return response

    def _pop(self) -> httpx.BaseTransport:
        try:
            return self._idle.pop()
        except IndexError:  # asked and popped in one step: another thread may take the last one
            return self._make()

    def _take_back(self, transport: httpx.BaseTransport, well: bool) -> None:
        keep = well and len(self._idle) < MAX_IDLE
        if keep:
            self._idle.append(transport)
        self._turns.release()
        if not keep:
            transport.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class _AsyncLent(httpx.AsyncByteStream):
    """A response's bytes; closing it gives the connection back."""

    def __init__(
        self, stream: httpx.AsyncByteStream, transport: httpx.AsyncBaseTransport, take_back: Callable[[httpx.AsyncBaseTransport, bool], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._transport: httpx.AsyncBaseTransport | None = transport
        self._take_back = take_back

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        well = False
        try:
            await self._stream.aclose()
            well = True
        finally:
            await self._take_back(transport, well)


class _Lent(httpx.SyncByteStream):
    """A response's bytes; closing it gives the connection back."""

    def __init__(self, stream: httpx.SyncByteStream, transport: httpx.BaseTransport, take_back: Callable[[httpx.BaseTransport, bool], None]) -> None:
        self._stream = stream
        self._transport: httpx.BaseTransport | None = transport
        self._take_back = take_back

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        well = False
        try:
            self._stream.close()
            well = True
        finally:
            self._take_back(transport, well)


def _tls(url: httpx.URL) -> ssl.SSLContext:
    """One TLS context for all connections: reading the certificates takes tens of milliseconds, and plain HTTP needs none (an empty context trusts nobody)."""
    return httpx.create_ssl_context() if url.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

"""HTTP connections for thousands of concurrent rollouts.

The pool of httpx examines all its connections for every request. With 64 concurrent requests that costs four times as much as the request itself,
and with some hundred idle connections it takes many milliseconds. Here, each connection has an httpx transport of its own, and the transports with
idle connections are kept in a stack: a request pops one and pushes it back, at the same cost for any number of connections.
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

#: How long an idle connection may be reused, in seconds.
KEEPALIVE_S = 60.0
#: The most idle connections that are kept; others are closed.
MAX_IDLE = 256
#: The limits of a transport with a single connection. Only one request uses it at a time, so requests never wait for each other inside it.
_SINGLE_CONNECTION = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_S)


def default_max_connections() -> int:
    """Return 1,000, or half of the number of files that this process may open, if that is less."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1000 if soft_limit == resource.RLIM_INFINITY else max(8, min(1000, soft_limit // 2))


def environment_proxy(url: httpx.URL) -> str | None:
    """Return the proxy that the environment names for a URL, or None.

    The variables are HTTP_PROXY, HTTPS_PROXY and ALL_PROXY. Hosts in NO_PROXY and the loopback addresses need no proxy.
    """
    if url.host in {"localhost", "127.0.0.1", "::1"} or urllib.request.proxy_bypass(url.host):
        return None
    proxies = urllib.request.getproxies()
    return proxies.get(url.scheme) or proxies.get("all")


def async_connections(url: httpx.URL, max_connections: int) -> AsyncConnections:
    """Create the connections of an `AsyncSandboxClient` to one service."""
    tls, proxy = _tls_context(url), environment_proxy(url)
    return AsyncConnections(lambda: httpx.AsyncHTTPTransport(verify=tls, proxy=proxy, limits=_SINGLE_CONNECTION), max_connections)


def sync_connections(url: httpx.URL, max_connections: int) -> Connections:
    """Create the connections of a `SandboxClient` to one service."""
    tls, proxy = _tls_context(url), environment_proxy(url)
    return Connections(lambda: httpx.HTTPTransport(verify=tls, proxy=proxy, limits=_SINGLE_CONNECTION), max_connections)


class AsyncConnections(httpx.AsyncBaseTransport):
    """A transport that gives each request a transport with a single connection.

    Args:
        new_transport: creates such a transport. The transport connects by itself, and connects again if its connection was closed.
        max_connections: how many requests may be in flight; further requests wait.
    """

    def __init__(self, new_transport: Callable[[], httpx.AsyncBaseTransport], max_connections: int) -> None:
        self._new_transport = new_transport
        self._idle: list[httpx.AsyncBaseTransport] = []
        self._free_connections = asyncio.Semaphore(max_connections)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Its connection is in use until the response is closed."""
        await self._free_connections.acquire()
        try:
            transport = self._idle.pop() if self._idle else self._new_transport()
            try:
                response = await transport.handle_async_request(request)
            except BaseException:  # the state of a connection after a failed or cancelled request is unknown
                await transport.aclose()
                raise
        except BaseException:  # also of a cancelled request: otherwise its place would stay taken for ever
            self._free_connections.release()
            raise
        response.stream = _AsyncPooledStream(cast(httpx.AsyncByteStream, response.stream), transport, self._return_transport)
        return response

    async def _return_transport(self, transport: httpx.AsyncBaseTransport, reusable: bool) -> None:
        keep = reusable and len(self._idle) < MAX_IDLE
        if keep:
            self._idle.append(transport)
        self._free_connections.release()
        if not keep:
            await transport.aclose()

    async def aclose(self) -> None:
        """Close the idle connections."""
        while self._idle:
            await self._idle.pop().aclose()


class Connections(httpx.BaseTransport):
    """The blocking counterpart of `AsyncConnections`, for use by any number of threads."""

    def __init__(self, new_transport: Callable[[], httpx.BaseTransport], max_connections: int) -> None:
        self._new_transport = new_transport
        self._idle: list[httpx.BaseTransport] = []
        self._free_connections = threading.Semaphore(max_connections)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send one request. Its connection is in use until the response is closed."""
        self._free_connections.acquire()
        try:
            transport = self._take_transport()
            try:
                response = transport.handle_request(request)
            except BaseException:  # the state of a connection after a failed or interrupted request is unknown
                transport.close()
                raise
        except BaseException:  # also of a cancelled request: otherwise its place would stay taken for ever
            self._free_connections.release()
            raise
        response.stream = _PooledStream(cast(httpx.SyncByteStream, response.stream), transport, self._return_transport)
        return response

    def _take_transport(self) -> httpx.BaseTransport:
        try:
            return self._idle.pop()
        except IndexError:  # testing for an idle one first would race with other threads
            return self._new_transport()

    def _return_transport(self, transport: httpx.BaseTransport, reusable: bool) -> None:
        keep = reusable and len(self._idle) < MAX_IDLE
        if keep:
            self._idle.append(transport)
        self._free_connections.release()
        if not keep:
            transport.close()

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()


class _AsyncPooledStream(httpx.AsyncByteStream):
    """The body of a response. Closing it returns the connection for reuse."""

    def __init__(
        self, stream: httpx.AsyncByteStream, transport: httpx.AsyncBaseTransport, return_transport: Callable[[httpx.AsyncBaseTransport, bool], Awaitable[None]]
    ) -> None:
        self._stream = stream
        self._transport: httpx.AsyncBaseTransport | None = transport
        self._return_transport = return_transport

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._stream.__aiter__()

    async def aclose(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        reusable = False
        try:
            await self._stream.aclose()
            reusable = True
        finally:
            await self._return_transport(transport, reusable)


class _PooledStream(httpx.SyncByteStream):
    """The body of a response. Closing it returns the connection for reuse."""

    def __init__(self, stream: httpx.SyncByteStream, transport: httpx.BaseTransport, return_transport: Callable[[httpx.BaseTransport, bool], None]) -> None:
        self._stream = stream
        self._transport: httpx.BaseTransport | None = transport
        self._return_transport = return_transport

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._stream)

    def close(self) -> None:
        transport, self._transport = self._transport, None
        if transport is None:
            return
        reusable = False
        try:
            self._stream.close()
            reusable = True
        finally:
            self._return_transport(transport, reusable)


def _tls_context(url: httpx.URL) -> ssl.SSLContext:
    """Create the TLS context that all connections share, because loading the certificates takes tens of milliseconds.

    Plain HTTP gets an empty context, which trusts no certificate.
    """
    return httpx.create_ssl_context() if url.scheme == "https" else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

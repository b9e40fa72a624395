"""Puts the connection limits of `connection_limiter` and those of WebSocket messages into effect in the server that runs the application.

ASGI gives an application no way to control how its server treats connections. uvicorn passes the application a bound method of its lifespan
object, which holds the `uvicorn.Config` in force, and it creates the listening sockets only after the application has started. So the connection
class that the configuration names can still be replaced while the application starts.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sandbox_server.api.websocket import MAX_MESSAGE_BYTES
from sandbox_server.connection_limiter import HEAD_WITHIN_S, ConnectionLimiter, LimitedConnection, places_for, raise_descriptor_limit

MIN_BACKLOG = 64
"""At least so many new connections can be accepted in one iteration of the event loop."""

UNCOUNTED_ITERATIONS = 4
"""For how many iterations of asyncio's event loop a newly accepted connection and the older one that is closed for it both hold a descriptor."""

CONSEQUENCE = "idle and half-sent connections are not closed, and anyone who can connect can keep others out without a token"
REMEDY = "start it with `python -m sandbox_server serve` or with plain `uvicorn sandbox_server.app:app`, or put a proxy that limits connections before it"


def limit_connections(receive: object, tenant_of: Callable[[Mapping[str, Any]], str | None], head_within_s: float = HEAD_WITHIN_S) -> str | None:
    """Raise the limit of open file descriptors, and make the server limit its connections.

    Args:
        receive: the server's function from which the application receives lifespan events.
        tenant_of: gives, for the scope of a request, the tenant of its token, as the application noted it there; None: it had no valid token.
        head_within_s: how long the head of a request may take, in seconds.

    Returns:
        What is not protected, why, and what to do; None where everything is protected.
    """
    descriptor_count = raise_descriptor_limit()
    config = getattr(getattr(receive, "__self__", None), "config", None)
    if not isinstance(config, uvicorn.Config):
        return f"connections are not limited: the service cannot reach the connections of this server: {CONSEQUENCE}; {REMEDY}"
    config.ws_max_size = MAX_MESSAGE_BYTES  # uvicorn's own limit is 16 MiB, for each of many connections
    config.ws_per_message_deflate = False  # compression takes memory for each connection, and gains nothing for keys and screens
    protocol = getattr(config, "http_protocol_class", None)
    if protocol is not HttpToolsProtocol:
        name = getattr(protocol, "__name__", protocol)
        return f"connections are not limited: uvicorn is configured to serve HTTP with {name}, not with httptools: {CONSEQUENCE}; {REMEDY}"
    places = places_for(descriptor_count)
    # In one iteration, asyncio's own event loop accepts as many connections as the kernel may queue; uvloop accepts one.
    if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
        config.backlog = min(config.backlog, max(MIN_BACKLOG, descriptor_count // 8))
        places = max(MIN_BACKLOG, places - UNCOUNTED_ITERATIONS * (config.backlog - MIN_BACKLOG))
    limiter = ConnectionLimiter(places=places, tenant_of=tenant_of, head_within_s=head_within_s)
    config.http_protocol_class = cast("type[asyncio.Protocol]", functools.partial(LimitedConnection, limiter=limiter))
    return None

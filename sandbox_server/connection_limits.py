"""Puts the connection limits of `doors` under the server that runs the application, whoever started it.

ASGI gives an application no hand in how its server treats connections. uvicorn passes the application a bound method of its lifespan object,
which holds the `uvicorn.Config` in force, and it makes the listening sockets only after the application has started. So the protocol class that
the configuration names can still be exchanged while the application starts.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sandbox_server.connection_limiter import HEAD_WITHIN_S, ConnectionLimiter, LimitedConnection, open_files_limit, places_for

FEWEST_AT_ONCE = 64
"""So many connections may always be taken in one turn of the event loop."""

TURNS_UNCOUNTED = 4
"""In so many turns asyncio takes a new connection, counts it, and closes an older one for it; until then both hold a descriptor."""

CONSEQUENCE = "idle and half-sent connections are not closed, and whoever can connect can keep others out without a token"
REMEDY = "start it with `python -m sandbox_server serve` or with plain `uvicorn sandbox_server.app:app`, or put a proxy that limits connections before it"


def limit_connections(receive: object, tenant_of: Callable[[Mapping[str, Any]], str | None], head_within_s: float = HEAD_WITHIN_S) -> str | None:
    """Raise the limit of open descriptors, and have the server close connections that are idle or half-sent.

    Args:
        receive: what the server gave the application to receive lifespan events with.
        tenant_of: whose valid token a request came with, as the application left its scope; None: it came without one.
        head_within_s: how long the head of a request may take, in seconds.

    Returns:
        What is not protected, why, and what to do; None where everything is.
    """
    descriptors = open_files_limit()
    config = getattr(getattr(receive, "__self__", None), "config", None)
    if not isinstance(config, uvicorn.Config):
        return f"connections are not limited: the service cannot reach the connections of this server: {CONSEQUENCE}; {REMEDY}"
    protocol = getattr(config, "http_protocol_class", None)
    if protocol is not HttpToolsProtocol:
        name = getattr(protocol, "__name__", protocol)
        return f"connections are not limited: uvicorn was told to serve HTTP with {name}, not with httptools: {CONSEQUENCE}; {REMEDY}"
    places = places_for(descriptors)
    # asyncio's own loop takes as many connections in one turn as the kernel may queue, and uvloop takes one.
    if isinstance(asyncio.get_running_loop(), asyncio.BaseEventLoop):
        config.backlog = min(config.backlog, max(FEWEST_AT_ONCE, descriptors // 8))
        places = max(FEWEST_AT_ONCE, places - TURNS_UNCOUNTED * (config.backlog - FEWEST_AT_ONCE))
    limiter = ConnectionLimiter(places=places, tenant_of=tenant_of, head_within_s=head_within_s)
    config.http_protocol_class = cast("type[asyncio.Protocol]", functools.partial(LimitedConnection, limiter=limiter))
    return None

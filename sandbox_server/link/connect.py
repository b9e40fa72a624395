"""Connecting to an agent. The scheme of the address selects the transport; frames and streams are the same over each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from sandbox_server.link.agent_link import PING_INTERVAL_S, AgentLink
from sandbox_server.link.endpoint import AgentEndpoint
from sandbox_server.link.errors import LinkLost
from sandbox_server.link.transports.stdio import open_stdio
from sandbox_server.link.transports.tls import open_tls
from sandbox_server.link.transports.unix import open_unix

#: Each connects the protocol to the agent. It raises OSError where nothing listens, and LinkLost where another program does.
TRANSPORTS: Mapping[str, Callable[[asyncio.Protocol, AgentEndpoint], Awaitable[None]]] = {"unix": open_unix, "tls": open_tls, "stdio": open_stdio}


async def connect(endpoint: AgentEndpoint, timeout_s: float = 10.0, *, ping_interval_s: float = PING_INTERVAL_S) -> AgentLink:
    """Connect to an agent and exchange hellos.

    Args:
        endpoint: the address of the agent, and what the two sides prove their identity with.
        timeout_s: how long the connection may take, and again how long the agent's hello may take, in seconds.
        ping_interval_s: how often the agent is pinged, in seconds.

    Raises:
        LinkLost: nothing listens there, another program does, the connection ended, or the hello did not arrive in time.
        ValueError: the endpoint lacks what its scheme needs.
    """
    scheme, colon, _ = endpoint.address.partition(":")
    if not colon or scheme not in TRANSPORTS:
        raise ValueError(f"cannot connect to an agent at {endpoint.address!r}: there is {', '.join(f'{name}:' for name in TRANSPORTS)}")
    link = AgentLink(asyncio.get_running_loop(), ping_interval_s)
    why = "the service stopped waiting for the agent's hello"
    try:
        async with asyncio.timeout(timeout_s):
            await TRANSPORTS[scheme](link, endpoint)
        await link.exchange_hellos(endpoint.token, timeout_s)
    except TimeoutError:
        why = f"the agent at {endpoint.address} did not say hello within {timeout_s:g} s"
        raise LinkLost(why) from None
    except OSError as error:
        why = f"nobody answers at {endpoint.address}: {error}"
        raise LinkLost(why) from error
    finally:
        if not link.is_ready:
            await link.close(why)
    return link

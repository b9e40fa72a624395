"""`unix:PATH`: the agent is on this machine, and the socket's folder lets only its user in."""

from __future__ import annotations

import asyncio

from sandbox_server.link.endpoint import Endpoint


async def open_unix(protocol: asyncio.Protocol, endpoint: Endpoint) -> None:
    """Connect the protocol to the agent's unix socket.

    Raises:
        OSError: nobody listens there.
    """
    path = endpoint.address.partition(":")[2]
    if not path:
        raise ValueError("unix: needs a path")
    await asyncio.get_running_loop().create_unix_connection(lambda: protocol, path)

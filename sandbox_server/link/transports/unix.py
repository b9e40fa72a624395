"""`unix:PATH`: a unix socket on this machine. Only its user can enter the folder of the socket."""

from __future__ import annotations

import asyncio

from sandbox_server.link.endpoint import AgentEndpoint


async def open_unix(protocol: asyncio.Protocol, endpoint: AgentEndpoint) -> None:
    """Connect the protocol to the agent's unix socket.

    Raises:
        OSError: nothing listens there.
        ValueError: the address has no path.
    """
    path = endpoint.address.partition(":")[2]
    if not path:
        raise ValueError("unix: needs a path")
    await asyncio.get_running_loop().create_unix_connection(lambda: protocol, path)

"""What is needed to connect to an agent."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sandbox_server.core.pipe import Pipe


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEndpoint:
    """How to connect to one agent.

    Args:
        address: `unix:PATH`, `tls:HOST:PORT` or `stdio:DESCRIPTION`; the description is only shown.
        token: proves to the agent that the service is the one that created it. It is sent only after the transport has made sure that the other end is
            the agent.
        certificate: for `tls:`, the only certificate that is accepted from the agent, in PEM.
        open_pipe: for `stdio:`, starts the agent's relay and returns its standard input and output; raises OSError where that fails.
    """

    address: str
    token: str = field(default="", repr=False)
    certificate: str | None = None
    open_pipe: Callable[[], Awaitable[Pipe]] | None = field(default=None, repr=False)

"""What must be known of an agent to connect to it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from sandbox_server.core.pipe import Pipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """How one agent is reached.

    Args:
        address: `unix:PATH`, `tls:HOST:PORT` or `stdio:ANYTHING`; what follows `stdio:` is for people.
        token: proves to the agent that this is its service. It is sent only over a connection that leads to the agent for certain.
        certificate: for `tls:`, the one certificate that the agent may show, in PEM.
        open_pipe: for `stdio:`, starts the agent's relay and gives its standard input and output; raises OSError where it cannot.
    """

    address: str
    token: str = field(default="", repr=False)
    certificate: str | None = None
    open_pipe: Callable[[], Awaitable[Pipe]] | None = field(default=None, repr=False)

"""Connects clients with the terminals of leased slots, and ends these connections with their leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sandbox_server.core.errors import PoolServiceError
from sandbox_server.dispatch.agent_errors import lease_error, translated_link_errors
from sandbox_server.dispatch.slot_locator import SlotLocator
from sandbox_server.link.terminal_stream import TerminalRequest, TerminalStream

TERMINAL_LOST_LINK_WAIT_S = 10.0
"""After a lost link: how long a connection to a terminal waits for the pool to find out whether the sandbox is lost, in seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenTerminal:
    """A connection to a terminal.

    Args:
        stream: its messages.
        lease_ended: done once its lease has ended; the result is the error that says how.
    """

    stream: TerminalStream
    lease_ended: asyncio.Future[PoolServiceError | None]


class Terminals:
    """The connections to terminals of leased slots. The terminals themselves are the agents', and live on without a connection.

    Args:
        slot_locator: finds the slot of a lease.
    """

    def __init__(self, slot_locator: SlotLocator) -> None:
        self._slot_locator = slot_locator
        self._open: dict[str, dict[asyncio.Future[PoolServiceError | None], str]] = {}

    @asynccontextmanager
    async def open_terminal(self, tenant: str, lease_id: str, request: TerminalRequest) -> AsyncIterator[OpenTerminal]:
        """Connect with a terminal for the time of a block.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease that holds the slot.
            request: which terminal, and how.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: the lease does not hold, or the connection has ended with it.
            QuotaExceeded: the lease or the terminal has as many as it may have.
            InvalidRequest: there is no such terminal to watch.
            NotImplementedHere: the agent has no terminals.
            BackendUnavailable: the agent cannot be reached, or could not open the terminal.
        """
        slot = self._slot_locator.locate_slot(tenant, lease_id).slot
        lease_ended: asyncio.Future[PoolServiceError | None] = asyncio.get_running_loop().create_future()
        self._open.setdefault(lease_id, {})[lease_ended] = tenant
        try:
            async with (
                translated_link_errors(self._slot_locator, tenant, lease_id, wait_s=TERMINAL_LOST_LINK_WAIT_S, field="session"),
                slot.open_terminal(request) as stream,
            ):
                yield OpenTerminal(stream=stream, lease_ended=lease_ended)
        finally:
            self._open[lease_id].pop(lease_ended)
            if not self._open[lease_id]:
                del self._open[lease_id]

    def handle_lease_end(self, lease_id: str) -> None:
        """Tell the connections to the terminals of a lease that it has ended."""
        for lease_ended, tenant in self._open.get(lease_id, {}).items():
            if not lease_ended.done():
                lease_ended.set_result(lease_error(self._slot_locator, tenant, lease_id))

"""Connections to programs that listen in leased slots. A connection ends with its lease."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sandbox_server.core.errors import LeaseLost, PortClosed, QuotaExceeded
from sandbox_server.dispatch.agent_errors import lease_error, translated_link_errors
from sandbox_server.dispatch.slot_locator import SlotLocator
from sandbox_server.link.errors import LimitReachedAtAgent, PortRefused
from sandbox_server.link.port_connection import PortConnection

PORTS_LOST_LINK_WAIT_S = 10.0
"""After a lost link: how long a request to a port waits for the pool to find out whether the sandbox is lost, in seconds."""
TENANT_SHARE = 0.5
"""The part of `limits.port_connections` that one tenant may have."""


class SlotPorts:
    """Opens connections to ports of leased slots.

    Args:
        slot_locator: finds the slot of a lease.
        most_connections: how many connections may be open at once: `limits.port_connections`.
    """

    def __init__(self, slot_locator: SlotLocator, most_connections: int) -> None:
        self._slot_locator = slot_locator
        self._most_connections = most_connections
        self._open_of_tenant: Counter[str] = Counter()
        self._ends_of_lease: dict[str, set[Callable[[], None]]] = {}

    @asynccontextmanager
    async def connect(self, tenant: str, lease_id: str, port: int) -> AsyncIterator[PortConnection]:
        """Connect to a port of the slot of a lease, for the time of the block. The block is ended when the lease ends.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease that holds the slot.
            port: the TCP port.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: the lease does not hold, or has ended meanwhile.
            PortClosed: nobody listens on the port, or the program that does has broken the connection.
            NotImplementedHere: the slot shares the network of its sandbox.
            QuotaExceeded: too many connections are open: of the slot, of the tenant, or of all.
            BackendUnavailable: the agent cannot be reached.
        """
        slot = self._slot_locator.locate_slot(tenant, lease_id).slot
        self._check_limits(tenant)
        self._open_of_tenant[tenant] += 1
        try:
            async with (
                self._ended_with_lease(tenant, lease_id),
                translated_link_errors(self._slot_locator, tenant, lease_id, wait_s=PORTS_LOST_LINK_WAIT_S),
                self._translated_refusals(tenant, lease_id),
                slot.open_port(port) as connection,
            ):
                await connection.wait_until_connected()
                yield connection
        finally:
            self._open_of_tenant[tenant] -= 1

    def handle_lease_end(self, lease_id: str) -> None:
        """End all connections to the slot of a lease that has ended."""
        for end_connection in self._ends_of_lease.get(lease_id, ()):
            end_connection()

    def _check_limits(self, tenant: str) -> None:
        most = self._most_connections
        of_tenant = max(1, int(most * TENANT_SHARE))
        if self._open_of_tenant.total() >= most or self._open_of_tenant[tenant] >= of_tenant:
            shares = f"more than {most} connections to ports of slots open at once, or {of_tenant} of one tenant: that is `limits.port_connections`"
            raise QuotaExceeded(f"{shares}; close some, or try again later", limit="port_connections", retry_after_s=5)

    @asynccontextmanager
    async def _ended_with_lease(self, tenant: str, lease_id: str) -> AsyncIterator[None]:
        """Run the block until its end or that of the lease.

        The agent ends the connection as well, once it is told to reset the slot. But that may be later, and the agent may be out of reach.
        """
        loop = asyncio.get_running_loop()
        deadline = asyncio.timeout(None)  # which becomes a time that is over when the lease ends

        def end_block() -> None:
            if not deadline.expired():
                deadline.reschedule(loop.time())

        try:
            async with deadline:
                ends = self._ends_of_lease.setdefault(lease_id, set())
                ends.add(end_block)
                try:
                    yield
                finally:
                    ends.discard(end_block)
                    if not ends:
                        self._ends_of_lease.pop(lease_id, None)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise lease_error(self._slot_locator, tenant, lease_id) or LeaseLost(f"lease {lease_id} has ended") from None

    @asynccontextmanager
    async def _translated_refusals(self, tenant: str, lease_id: str) -> AsyncIterator[None]:
        try:
            yield
        except PortRefused as refused:
            # An agent that resets the slot ends its connections, and may do so before the end of the lease is handled here.
            raise lease_error(self._slot_locator, tenant, lease_id) or PortClosed(refused.detail) from None
        except LimitReachedAtAgent as refused:
            raise QuotaExceeded(refused.detail, limit="slot_port_connections", retry_after_s=1) from None

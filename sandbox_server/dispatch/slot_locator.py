"""What the dispatch needs from the pool: where the slot of a lease is, and what became of a sandbox whose link was lost."""

from __future__ import annotations

from typing import Protocol

from sandbox_server.core.errors import SandboxLost
from sandbox_server.core.types import Lease, PoolSpec
from sandbox_server.link.slot_client import SlotClient


class SlotLocation(Protocol):
    """Where the slot of a held lease is now."""

    @property
    def lease(self) -> Lease: ...

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def slot(self) -> SlotClient:
        """The client for the calls and files of the slot."""
        ...


class SlotLocator(Protocol):
    """Finds the slots of leases. `pool.service.PoolService` implements it."""

    def locate_slot(self, tenant: str, lease_id: str) -> SlotLocation:
        """Find the slot of a lease that holds.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease.

        Raises:
            LeaseNotFound: the tenant has no such lease.
            LeaseLost: the lease has ended.
            SandboxLost: the lease ended with its sandbox.
            BackendUnavailable: the agent cannot be reached at the moment.
        """
        ...

    def record_call_start(self, lease_id: str) -> None:
        """Record that a call runs under this lease. The lease does not expire while one does."""
        ...

    def record_call_end(self, lease_id: str) -> None:
        """Record that a call of which `record_call_start` was recorded has ended."""
        ...

    async def wait_for_reconnect_or_loss(self, lease_id: str, wait_s: float) -> SandboxLost | None:
        """Wait until the pool knows whether the sandbox of a lease is lost or can be reached again.

        Args:
            lease_id: the lease.
            wait_s: the longest time to wait, in seconds.

        Returns:
            The error where the sandbox is lost; None where it can be reached again, the lease ended otherwise, or the time is over.
        """
        ...

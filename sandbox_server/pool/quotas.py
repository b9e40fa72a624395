"""What one tenant may have of all pools together: leases, and acquires that queue."""

from __future__ import annotations

from collections.abc import Mapping

from sandbox_server.core.errors import InvalidRequest, QuotaExceeded
from sandbox_server.core.types import AcquireRequest
from sandbox_server.pool.pool import Pool
from sandbox_server.pool.wiring import Wiring


class Quotas:
    """Holds tenants to their limits.

    Args:
        pools: every pool there is.
        wiring: knows the limits.
    """

    def __init__(self, pools: Mapping[str, Pool], wiring: Wiring) -> None:
        self._pools = pools
        self._wiring = wiring

    def check_leases(self, request: AcquireRequest) -> None:
        """Refuse an acquire with which its tenant would have more leases than it may, those it waits for included.

        Raises:
            InvalidRequest: it could never be served, whatever is released.
            QuotaExceeded: naming `max_leases`.
        """
        most, tenant = self._wiring.max_leases(request.tenant), request.tenant
        if most is None:
            return
        if request.count > most:
            raise InvalidRequest(f"count is {request.count}, and this tenant's max_leases is {most}: ask for fewer, or have an admin raise it", field="count")
        has = sum(pool.book.leased_by[tenant] + pool.book.line.wanted_by[tenant] for pool in self._pools.values())
        if has + request.count > most:
            why = f"{has} leases are held or waited for, and this tenant's max_leases is {most}"
            raise QuotaExceeded(f"{why}: release some, or ask again later", limit="max_leases", retry_after_s=2)

    def admits(self, request: AcquireRequest) -> bool:
        """Whether an acquire that waits may be served now: its tenant's limit may be lower than when it came."""
        most = self._wiring.max_leases(request.tenant)
        return most is None or sum(pool.book.leased_by[request.tenant] for pool in self._pools.values()) + request.count <= most

    def check_waiters(self, tenant: str) -> None:
        """Refuse that one more acquire queues, the one that just joined the line included in those that do.

        Raises:
            QuotaExceeded: naming `max_waiters`.
        """
        most = self._wiring.max_waiters(tenant)
        if most is None:
            return
        others = sum(pool.book.line.count_of(tenant) for pool in self._pools.values()) - 1
        if others >= most:
            why = f"no slot is free, {others} acquires of this tenant wait already, and its max_waiters is {most}"
            raise QuotaExceeded(f"{why}: ask again later", limit="max_waiters", retry_after_s=5)

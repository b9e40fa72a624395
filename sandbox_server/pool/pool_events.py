"""Publishes the events of a pool: about itself, its leases, and the acquire that it holds slots for."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from sandbox_server.core.types import ClaimantView, Lease, LeaseState, PoolId
from sandbox_server.pool.events import EventLog

log = logging.getLogger(__name__)

EVENT_OF_END = {LeaseState.RELEASED: "lease.released", LeaseState.EXPIRED: "lease.expired", LeaseState.SANDBOX_LOST: "lease.lost"}


class PoolEvents:
    """Publishes the events of one pool.

    Args:
        pool_id: the pool.
        events: the log that takes the events.
    """

    def __init__(self, pool_id: PoolId, events: EventLog) -> None:
        self._pool_id = pool_id
        self._events = events

    def publish_pool_event(self, kind: str, *, is_shared: bool, **data: Any) -> None:
        """Publish an event about the pool to its owner, or to every tenant if the pool is shared, and to admins.

        Args:
            kind: the kind of the event, such as `pool.created`.
            is_shared: whether every tenant may use the pool.
            data: JSON values to publish beside the pool's name.
        """
        owner = None if is_shared else self._pool_id.tenant
        self._events.publish(kind, tenant=owner, admins_too=True, **self._pool_id.fields, **data)

    def publish_lease_event(self, kind: str, lease: Lease, **data: Any) -> None:
        """Publish an event about a lease to its tenant.

        Args:
            kind: the kind of the event, such as `lease.renewed`.
            lease: the lease.
            data: JSON values to publish beside the lease's ids.
        """
        self._events.publish(
            kind,
            tenant=lease.tenant,
            lease_id=lease.lease_id,
            pool=lease.pool,
            sandbox_id=lease.sandbox_id,
            slot_id=lease.slot.name,
            run_id=lease.run_id,
            trajectory_id=lease.trajectory_id,
            **data,
        )

    def publish_lease_begin(self, lease: Lease) -> None:
        """Publish that a slot has been leased."""
        self.publish_lease_event("lease.acquired", lease, expires_at=lease.expires_at)

    def publish_lease_end(self, lease: Lease) -> None:
        """Publish that a lease has ended, and log it."""
        level = logging.DEBUG if lease.state is LeaseState.RELEASED else logging.INFO
        fields = {"lease_id": lease.lease_id, **self._pool_id.fields, "tenant": lease.tenant, "run_id": lease.run_id, "sandbox_id": lease.sandbox_id}
        log.log(level, "lease ended: %s", lease.end_detail, extra=fields)
        self.publish_lease_event(EVENT_OF_END[lease.state], lease, detail=lease.end_detail)

    def publish_claimant(self, claimant: ClaimantView | None) -> None:
        """Publish to admins which acquire the pool holds free slots for; None if it holds them for none any more."""
        if claimant is not None:
            who = {"pool": self._pool_id.name, "tenant": claimant.tenant, "run_id": claimant.run_id}
            log.info("slots that come free are held for an acquire of %d slots that has waited for %.1f s", claimant.count, claimant.waited_s, extra=who)
        data = None if claimant is None else asdict(claimant)
        self._events.publish("pool.claimant", admin_only=True, **self._pool_id.fields, claimant=data)

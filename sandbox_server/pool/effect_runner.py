"""Carries out the effects that follow from the decisions of one pool."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from sandbox_server.core.types import Lease
from sandbox_server.pool.dependencies import PoolDependencies
from sandbox_server.pool.fleet.effects import (
    AnnounceLeaseBegin,
    AnnounceLeaseEnd,
    CountMetric,
    DestroySandbox,
    DropCache,
    Effect,
    PublishEvent,
    RecordSandbox,
    RefuseUnservableWaiters,
    WaitForAdoptedCalls,
)
from sandbox_server.pool.fleet.supervision.supervisor_set import SupervisorSet
from sandbox_server.pool.granting.grant_service import GrantService
from sandbox_server.pool.lease_directory import LeaseDirectory
from sandbox_server.pool.pool_events import PoolEvents

AnyPool = TypeVar("AnyPool")


class EffectRunner(Generic[AnyPool]):
    """Carries out effects: writes records, publishes events, counts, and instructs the supervisors.

    Args:
        pool: the pool, which the lease directory names as the pool of its leases.
        directory: the index of held leases.
        pool_events: publishes the pool's events.
        supervisors: the supervisors of the pool's sandboxes.
        grant_service: refuses the pool's waiting acquires.
        dependencies: the store, the log of events and the metrics.
    """

    def __init__(
        self,
        pool: AnyPool,
        directory: LeaseDirectory[AnyPool],
        pool_events: PoolEvents,
        supervisors: SupervisorSet,
        grant_service: GrantService,
        dependencies: PoolDependencies,
    ) -> None:
        self._pool = pool
        self._directory = directory
        self._pool_events = pool_events
        self._supervisors = supervisors
        self._grant_service = grant_service
        self._dependencies = dependencies

    def carry_out(self, effects: Iterable[Effect]) -> None:
        """Carry out effects in their order. Nothing is awaited: the store and the supervisors do their work in the background."""
        for effect in effects:
            self._carry_out_effect(effect)

    def _carry_out_effect(self, effect: Effect) -> None:
        match effect:
            case RecordSandbox(record):
                self._dependencies.store.put(record)
            case PublishEvent():
                self._dependencies.events.publish(effect.kind, admin_only=True, **effect.data)
            case CountMetric():
                self._dependencies.meter.count(effect.name, **effect.labels)
            case AnnounceLeaseBegin(lease):
                self._announce_lease_begin(lease)
            case AnnounceLeaseEnd(lease):
                self._announce_lease_end(lease)
            case RefuseUnservableWaiters():
                self._grant_service.refuse_unservable_waiters()
            case DestroySandbox() | DropCache() | WaitForAdoptedCalls():
                self._supervisors.carry_out(effect)

    def _announce_lease_begin(self, lease: Lease) -> None:
        self._directory.add_lease(lease.lease_id, self._pool)
        self._pool_events.publish_lease_begin(lease)

    def _announce_lease_end(self, lease: Lease) -> None:
        self._pool_events.publish_lease_end(lease)
        self._directory.remove_lease(lease.lease_id)

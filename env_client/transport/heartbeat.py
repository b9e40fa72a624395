"""Renewing leases in time: a schedule of the renewals, and the task or the thread that sends them."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from env_client.errors import SandboxError, ServiceError, TransportError
from env_client.messages.leases import renew_message
from env_client.transport.senders import AsyncSender, SyncSender
from env_client.values import LeaseInfo, Renewed

log = logging.getLogger("env_client")

#: The most leases that one request renews.
MAX_LEASES_OF_RENEWAL = 200


class RenewableLease(Protocol):
    """A lease that the heartbeat renews, and that is notified of the outcome."""

    @property
    def lease_id(self) -> str:
        """The id of the lease."""

    def record_renewal(self, info: LeaseInfo) -> None:
        """Take note that the lease was renewed."""

    def record_loss(self, error: ServiceError) -> None:
        """Take note that the lease has ended."""

    def record_renewal_error(self, error: SandboxError) -> None:
        """Take note that the lease could not be renewed. The heartbeat tries again."""


@dataclass(slots=True)
class _ScheduledLease:
    lease: RenewableLease
    ttl_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class RenewalBatch:
    """Leases that one request renews, for the same time to live."""

    lease_ids: tuple[str, ...]
    ttl_s: float


class RenewalSchedule:
    """Which leases are renewed when.

    Each lease is due after a third of its `ttl_s`. Leases that are due soon are renewed together with those that are due now.
    """

    def __init__(self) -> None:
        self._leases: dict[str, _ScheduledLease] = {}
        self._failing = False

    def add_lease(self, lease: RenewableLease, ttl_s: float, now_s: float) -> None:
        """Schedule the renewals of a lease.

        Args:
            lease: the lease.
            ttl_s: how long each renewal makes it last, in seconds.
            now_s: the present time on the monotonic clock, in seconds.
        """
        self._leases[lease.lease_id] = _ScheduledLease(lease, ttl_s, now_s + ttl_s / 3)

    def remove_leases(self, lease_ids: Iterable[str]) -> None:
        """Renew these leases no longer."""
        for lease_id in lease_ids:
            self._leases.pop(lease_id, None)

    def next_due_s(self) -> float | None:
        """Return when the next renewal is due, on the monotonic clock in seconds; None if there are no leases."""
        return min((scheduled.due_s for scheduled in self._leases.values()), default=None)

    def take_due_batches(self, now_s: float) -> list[RenewalBatch]:
        """Return the renewals to send now. Their leases are due again within seconds, in case a renewal fails."""
        if not any(scheduled.due_s <= now_s for scheduled in self._leases.values()):
            return []
        ids_by_ttl: dict[float, list[str]] = {}
        for lease_id, scheduled in self._leases.items():
            soon_s = scheduled.ttl_s / 12
            if scheduled.due_s <= now_s + soon_s:
                scheduled.due_s = now_s + min(5.0, soon_s)
                ids_by_ttl.setdefault(scheduled.ttl_s, []).append(lease_id)
        return [
            RenewalBatch(tuple(lease_ids[first : first + MAX_LEASES_OF_RENEWAL]), ttl_s)
            for ttl_s, lease_ids in ids_by_ttl.items()
            for first in range(0, len(lease_ids), MAX_LEASES_OF_RENEWAL)
        ]

    def record_outcome(self, batch: RenewalBatch, outcome: Renewed | SandboxError, now_s: float) -> None:
        """Apply the outcome of a renewal: the response of the service, or the error of the request.

        Args:
            batch: the leases in the request.
            outcome: the response or the error.
            now_s: the present time on the monotonic clock, in seconds.
        """
        if isinstance(outcome, Renewed):
            self._record_response(outcome, now_s)
        else:
            self._record_failure(batch, outcome)

    def _record_response(self, renewed: Renewed, now_s: float) -> None:
        self._failing = False
        for info in renewed.leases:
            scheduled = self._leases.get(info.lease_id)
            if scheduled is not None:
                scheduled.due_s = now_s + scheduled.ttl_s / 3
                scheduled.lease.record_renewal(info)
        for lease_id, error in renewed.lost.items():
            scheduled = self._leases.pop(lease_id, None)
            if scheduled is not None:
                log.warning("lease %s is lost: %s", lease_id, error)
                scheduled.lease.record_loss(error)

    def _record_failure(self, batch: RenewalBatch, error: SandboxError) -> None:
        # The sender logs an outage of the service. Any other error is a warning once, until a renewal succeeds.
        level = logging.INFO if self._failing or isinstance(error, TransportError) else logging.WARNING
        log.log(level, "%d leases could not be renewed, retrying: %s", len(batch.lease_ids), error)
        self._failing = True
        for lease_id in batch.lease_ids:
            if lease_id in self._leases:
                self._leases[lease_id].lease.record_renewal_error(error)


class AsyncHeartbeat:
    """Renews the leases of an `AsyncSandboxClient` in a task that runs while there are leases.

    Args:
        sender: a sender that does not retry for long, because the schedule repeats failed renewals.
        clock: returns monotonic seconds.
    """

    def __init__(self, sender: AsyncSender, clock: Callable[[], float] = time.monotonic) -> None:
        self._sender = sender
        self._clock = clock
        self._schedule = RenewalSchedule()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add_lease(self, lease: RenewableLease, ttl_s: float) -> None:
        """Renew a lease from now on, each time for `ttl_s` seconds."""
        self._schedule.add_lease(lease, ttl_s, self._clock())
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="sandbox-heartbeat")

    def remove_leases(self, lease_ids: Iterable[str]) -> None:
        """Renew these leases no longer."""
        self._schedule.remove_leases(lease_ids)
        self._changed.set()

    async def renew_due_leases(self) -> None:
        """Send the renewals that are due now."""
        for batch in self._schedule.take_due_batches(self._clock()):
            self._schedule.record_outcome(batch, await self._send_renewal(batch), self._clock())

    async def stop_renewals(self) -> None:
        """Stop renewing leases."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _send_renewal(self, batch: RenewalBatch) -> Renewed | SandboxError:
        try:
            return await self._sender.send(renew_message(batch.lease_ids, batch.ttl_s))
        except SandboxError as error:
            self._sender.core.record_failure(error)
            return error

    async def _run(self) -> None:
        while (due_s := self._schedule.next_due_s()) is not None:
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, due_s - self._clock())):
                    await self._changed.wait()
            except TimeoutError:
                await self.renew_due_leases()


class ThreadHeartbeat:
    """Renews the leases of a `SandboxClient` in a daemon thread that runs while there are leases.

    Args:
        sender: a sender that does not retry for long, because the schedule repeats failed renewals.
        clock: returns monotonic seconds.
    """

    def __init__(self, sender: SyncSender, clock: Callable[[], float] = time.monotonic) -> None:
        self._thread: threading.Thread | None = None
        #: Protects the schedule and the thread; notified when the schedule changes.
        self._changed = threading.Condition()
        self._schedule = RenewalSchedule()
        self._clock = clock
        self._sender = sender

    def add_lease(self, lease: RenewableLease, ttl_s: float) -> None:
        """Renew a lease from now on, each time for `ttl_s` seconds."""
        with self._changed:
            self._schedule.add_lease(lease, ttl_s, self._clock())
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox-heartbeat", daemon=True)
                self._thread.start()

    def remove_leases(self, lease_ids: Iterable[str]) -> None:
        """Renew these leases no longer."""
        with self._changed:
            self._schedule.remove_leases(lease_ids)
            self._changed.notify()

    def renew_due_leases(self) -> None:
        """Send the renewals that are due now."""
        with self._changed:
            batches = self._schedule.take_due_batches(self._clock())
        for batch in batches:
            outcome = self._send_renewal(batch)
            with self._changed:
                self._schedule.record_outcome(batch, outcome, self._clock())

    def stop_renewals(self) -> None:
        """Stop renewing leases, and wait for a renewal that is being sent."""
        with self._changed:
            self._schedule = RenewalSchedule()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _send_renewal(self, batch: RenewalBatch) -> Renewed | SandboxError:
        try:
            return self._sender.send(renew_message(batch.lease_ids, batch.ttl_s))
        except SandboxError as error:
            self._sender.core.record_failure(error)
            return error

    def _run(self) -> None:
        while True:
            with self._changed:
                due_s = self._schedule.next_due_s()
                if due_s is None:
                    self._thread = None
                    return
                if due_s > self._clock():
                    self._changed.wait(due_s - self._clock())
                    continue
            self.renew_due_leases()

"""Which calls are accepted: how many may be in flight, how many may wait, and how many a lease may have over its life."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sandbox_server.core.errors import QuotaExceeded
from sandbox_server.core.execution import Reason, Result, ToolCall
from sandbox_server.dispatch.call_tracker import CallTracker
from sandbox_server.dispatch.limits.concurrency import ConcurrencyLimiter
from sandbox_server.dispatch.limits.room_queue import TENANT_SHARE
from sandbox_server.dispatch.result_records import ResultStore
from sandbox_server.dispatch.runner.call_queue import QueuedCall

AGENT_CALL_LIMIT = "calls"
"""The `limit` in the metadata of a result whose agent's journal has as many calls of the lease as it takes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallLimits:
    """How many calls there may be, by the names of the settings.

    Args:
        in_flight: how many calls may be in flight (`limits.calls_in_flight`); those of one tenant are at most half as many.
        of_lease: how many calls a lease may have over its life (`limits.lease_calls`).
    """

    in_flight: int = 20_000
    of_lease: int = 100_000

    @property
    def in_flight_of_tenant(self) -> int:
        """How many calls of one tenant may be in flight."""
        return max(1, math.ceil(self.in_flight * TENANT_SHARE))


class CallAdmission:
    """Checks calls against the limits. A call that is known already, because it is recorded or in flight, is always accepted: it runs nothing new.

    Args:
        limits: how many calls there may be.
        result_store: the calls that have a recorded result.
        call_tracker: the calls in flight.
        concurrency_limiter: the calls that run and wait.
    """

    def __init__(self, limits: CallLimits, result_store: ResultStore, call_tracker: CallTracker, concurrency_limiter: ConcurrencyLimiter) -> None:
        self._limits = limits
        self._result_store = result_store
        self._call_tracker = call_tracker
        self._concurrency_limiter = concurrency_limiter

    def check_request(self, tenant: str, items: Sequence[ToolCall | Result]) -> None:
        """Check whether the calls of a request may be in flight.

        Args:
            tenant: the tenant that sends the request.
            items: the calls; results among them are not counted.

        Raises:
            QuotaExceeded: too many calls are in flight, or too many of the tenant's wait.
        """
        self._check_in_flight_count(tenant, sum(isinstance(item, ToolCall) for item in items))
        try:
            self._concurrency_limiter.check_queue_room(tenant)
        except QuotaExceeded:
            if not all(isinstance(item, Result) or self._is_known(item) for item in items):
                raise

    def check_call(self, call: ToolCall) -> None:
        """Check whether a lease may have one more call.

        Raises:
            QuotaExceeded: it has had all the calls that it may have.
        """
        if self._left_of_lease(call.lease_id) <= 0 and not self._is_known(call):
            raise QuotaExceeded(self.too_many_calls(), limit="lease_calls")

    def check_result(self, result: Result) -> None:
        """Check whether a result says that the agent takes no more calls of the lease.

        Raises:
            QuotaExceeded: it does.
        """
        if result.reason is Reason.BACKEND_ERROR and result.metadata.get("limit") == AGENT_CALL_LIMIT:
            raise QuotaExceeded(self.too_many_calls(), limit="lease_calls")

    def split_calls_of_lease(self, lease_id: str, calls: list[QueuedCall]) -> tuple[list[QueuedCall], list[QueuedCall]]:
        """Split the calls of a lease into those that the lease may still have, and the others."""
        left = self._left_of_lease(lease_id)
        if len(calls) <= left:
            return calls, []
        accepted, refused = [], []
        for queued in calls:
            if self._is_known(queued.call):
                accepted.append(queued)
            elif left > 0:
                left -= 1
                accepted.append(queued)
            else:
                refused.append(queued)
        return accepted, refused

    def too_many_calls(self) -> str:
        """The sentence for a lease that has had all the calls that it may have."""
        return f"this lease has had the {self._limits.of_lease} calls that `limits.lease_calls` allows: acquire a new lease"

    def _check_in_flight_count(self, tenant: str, count: int) -> None:
        of_tenant, most_of_tenant = self._call_tracker.count_of_tenant(tenant), self._limits.in_flight_of_tenant
        if of_tenant + count > most_of_tenant:
            share = f"{of_tenant} calls of this tenant are under way, and one tenant may have {most_of_tenant} of the {self._limits.in_flight}"
            raise QuotaExceeded(f"{share} of `limits.calls_in_flight`: ask again later", limit="calls_in_flight", retry_after_s=2)
        if self._call_tracker.call_count + count > self._limits.in_flight:
            full = f"{self._call_tracker.call_count} calls are under way, and `limits.calls_in_flight` is {self._limits.in_flight}"
            raise QuotaExceeded(f"{full}: ask again later", limit="calls_in_flight", retry_after_s=2)

    def _left_of_lease(self, lease_id: str) -> int:
        return self._limits.of_lease - self._result_store.result_count(lease_id) - self._call_tracker.count_of_lease(lease_id)

    def _is_known(self, call: ToolCall) -> bool:
        is_recorded = self._result_store.find_result(call.lease_id, call.call_id) is not None
        return is_recorded or self._call_tracker.find_call(call.lease_id, call.call_id) is not None

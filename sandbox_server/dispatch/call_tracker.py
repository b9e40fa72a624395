"""Which calls are in flight in this process, and for which leases a call may have run although no result is known."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from sandbox_server.core.execution import ToolCall

MAX_UNCERTAIN_LEASES = 100_000

_CallKey = tuple[str, str]


class CallTracker:
    """The calls that were accepted and have no result yet, and the leases with calls whose outcome is unknown.

    A result may only say that a call did not run if that is certain. A call may have run if it was sent to its agent, if another request sent the
    same call, or if its lease has calls of unknown outcome: of an earlier process of the service, or sent without ever getting a result.

    Args:
        uncertain_lease_ids: the leases that were held when an earlier process of the service ended.
        max_uncertain_leases: how many leases are remembered; beyond that every lease counts as one with calls of unknown outcome.
    """

    def __init__(self, uncertain_lease_ids: Iterable[str] = (), max_uncertain_leases: int = MAX_UNCERTAIN_LEASES) -> None:
        self.call_count = 0
        self._calls: dict[_CallKey, list[ToolCall]] = {}
        self._sent: set[_CallKey] = set()
        self._count_by_lease: Counter[str] = Counter()
        self._count_by_tenant: Counter[str] = Counter()
        self._result_waiters: dict[_CallKey, list[asyncio.Future[None]]] = {}
        self._uncertain_leases = set(uncertain_lease_ids)
        self._max_uncertain_leases = max_uncertain_leases
        self._is_every_lease_uncertain = False

    def add_call(self, tenant: str, call: ToolCall) -> None:
        """Record that a call was accepted. Several requests may have the same call in flight: its agent runs it once."""
        self.call_count += 1
        self._count_by_tenant[tenant] += 1
        self._count_by_lease[call.lease_id] += 1
        self._calls.setdefault((call.lease_id, call.call_id), []).append(call)

    def mark_sent(self, call: ToolCall) -> None:
        """Record that a call is being sent to its agent. From now on it may run."""
        self._sent.add((call.lease_id, call.call_id))

    def remove_call(self, tenant: str, call: ToolCall) -> None:
        """Record that a call has its result, and wake what waits for it."""
        key = (call.lease_id, call.call_id)
        self.call_count -= 1
        _decrement(self._count_by_tenant, tenant)
        _decrement(self._count_by_lease, call.lease_id)
        same = self._calls[key]
        same.remove(call)
        if not same:
            del self._calls[key]
            self._sent.discard(key)
        for waiter in self._result_waiters.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def find_call(self, lease_id: str, call_id: str) -> ToolCall | None:
        """The call in flight with this id; None where there is none."""
        calls = self._calls.get((lease_id, call_id))
        return calls[0] if calls else None

    def find_unsent_call(self, lease_id: str, call_id: str) -> ToolCall | None:
        """The call in flight with this id, if it has not been sent to its agent; None otherwise."""
        return None if (lease_id, call_id) in self._sent else self.find_call(lease_id, call_id)

    def count_of_lease(self, lease_id: str) -> int:
        """The number of calls in flight of a lease."""
        return self._count_by_lease[lease_id]

    def count_of_tenant(self, tenant: str) -> int:
        """The number of calls in flight that a tenant has requested."""
        return self._count_by_tenant[tenant]

    async def wait_for_result(self, lease_id: str, call_id: str) -> None:
        """Return once a request that has this call in flight has its result."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._result_waiters.setdefault((lease_id, call_id), [])
        waiters.append(waiter)
        try:
            await waiter
        finally:
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters and self._result_waiters.get((lease_id, call_id)) is waiters:
                del self._result_waiters[lease_id, call_id]

    def add_unknown_outcome(self, lease_id: str) -> None:
        """Record that a call of a lease was sent, and that its outcome is unknown."""
        if len(self._uncertain_leases) < self._max_uncertain_leases:
            self._uncertain_leases.add(lease_id)
        else:
            self._is_every_lease_uncertain = True

    def has_unknown_outcome(self, lease_id: str) -> bool:
        """Whether a call of a lease may have run although no result is known."""
        return self._is_every_lease_uncertain or lease_id in self._uncertain_leases

    def may_have_run(self, call: ToolCall, *, was_sent: bool) -> bool:
        """Whether a call in flight may have run.

        Args:
            call: the call.
            was_sent: whether the request that asks has sent it.
        """
        is_shared = len(self._calls.get((call.lease_id, call.call_id), ())) > 1
        return was_sent or is_shared or self.has_unknown_outcome(call.lease_id)


def _decrement(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]

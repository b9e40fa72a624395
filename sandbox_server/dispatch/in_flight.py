"""Which tool calls are under way in this process, and how many."""

from __future__ import annotations

import asyncio
from collections import Counter

from sandbox_server.core.execution import ToolCall


class InFlightCalls:
    """The calls that were taken and have no result yet; those that wait for their turn included."""

    def __init__(self) -> None:
        self.count = 0
        self._calls: dict[tuple[str, str], list[ToolCall]] = {}
        self._asked: set[tuple[str, str]] = set()
        self._of_lease: Counter[str] = Counter()
        self._of_tenant: Counter[str] = Counter()
        self._waiting: dict[tuple[str, str], list[asyncio.Future[None]]] = {}

    def begin(self, tenant: str, call: ToolCall) -> None:
        """A call was taken. The same one may be under way several times: the later ones join the first at the agent."""
        self.count += 1
        self._of_tenant[tenant] += 1
        self._of_lease[call.lease_id] += 1
        self._calls.setdefault((call.lease_id, call.call_id), []).append(call)

    def asked(self, call: ToolCall) -> None:
        """Its agent is asked for it: from now on it may run."""
        self._asked.add((call.lease_id, call.call_id))

    def end(self, tenant: str, call: ToolCall) -> None:
        """It came to a result."""
        key = (call.lease_id, call.call_id)
        self.count -= 1
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
        self._of_lease[call.lease_id] -= 1
        if not self._of_lease[call.lease_id]:
            del self._of_lease[call.lease_id]
        same = self._calls[key]
        same.remove(call)
        if not same:
            del self._calls[key]
            self._asked.discard(key)
        for waiter in self._waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def of(self, lease_id: str, call_id: str) -> ToolCall | None:
        """The call under way by this name."""
        calls = self._calls.get((lease_id, call_id))
        return calls[0] if calls else None

    def held(self, lease_id: str, call_id: str) -> ToolCall | None:
        """The call under way by this name, if its agent has not been asked for it yet."""
        return None if (lease_id, call_id) in self._asked else self.of(lease_id, call_id)

    def has_twin(self, call: ToolCall) -> bool:
        """Whether the same call is under way for somebody else too."""
        return len(self._calls.get((call.lease_id, call.call_id), ())) > 1

    def of_lease(self, lease_id: str) -> int:
        """How many calls of this lease are under way."""
        return self._of_lease[lease_id]

    def of_tenant(self, tenant: str) -> int:
        """How many calls under way this tenant has asked for."""
        return self._of_tenant[tenant]

    async def landed(self, lease_id: str, call_id: str) -> None:
        """Return once a call under way by this name has its result."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault((lease_id, call_id), [])
        waiting.append(waiter)
        try:
            await waiter
        finally:
            if waiter in waiting:
                waiting.remove(waiter)
            if not waiting and self._waiting.get((lease_id, call_id)) is waiting:
                del self._waiting[lease_id, call_id]

"""From a place in the line to an answer: waking who is served, narrowing before the grant counts, giving back what nobody took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from sandbox_server.core.errors import InvalidRequest, NoCapacity, NotImplementedHere, PoolServiceError, QuotaExceeded
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, PoolSpec
from sandbox_server.link import AgentRefused, LinkLost
from sandbox_server.pool.leases import LeaseBook
from sandbox_server.pool.sandbox import Sandbox
from sandbox_server.pool.waiting import Waiter
from sandbox_server.pool.wiring import Wiring


class Granting:
    """Answers the acquires of one pool.

    Args:
        book: the pool's lease book.
        sandboxes: the pool's sandboxes, live.
        spec: the pool's spec.
        work: lets the pool go on after something was given back.
        wiring: clock and store.
    """

    def __init__(self, book: LeaseBook, sandboxes: Mapping[str, Sandbox], spec: PoolSpec, work: Callable[[], None], wiring: Wiring) -> None:
        self.spec = spec
        self.capabilities: Mapping[str, Any] = {}
        self.tasks: set[asyncio.Task[None]] = set()
        self._book = book
        self._sandboxes = sandboxes
        self._work = work
        self._wiring = wiring
        self._answers: dict[int, asyncio.Future[None]] = {}
        self._narrowing: set[int] = set()

    def refuse_impossible(self, request: AcquireRequest) -> None:
        """Refuse at once what waiting cannot help.

        Raises:
            InvalidRequest: the pool can never serve it.
            NotImplementedHere: it asks for what is not built.
            QuotaExceeded: too many wait already.
        """
        if request.count > self.spec.max_slots:
            raise InvalidRequest(f"count is {request.count}, and pool {request.pool!r} can never hold more than {self.spec.max_slots} slots", field="count")
        if request.allow_network and not self.spec.slots_have_network:
            raise InvalidRequest(f"allow_network may only narrow, and the slots of pool {request.pool!r} have no network", field="allow_network")
        if request.cache != "none":
            raise NotImplementedHere("cache is not built yet")
        networks = self.capabilities.get("network")
        if self._must_narrow(request) and isinstance(networks, list) and "none" not in networks:
            raise NotImplementedHere(f"the isolation mode of pool {request.pool!r} cannot take the network away from a slot", field="allow_network")
        if len(self._book.line) >= self._wiring.limits.max_waiters:
            raise QuotaExceeded(f"max_waiters: {self._wiring.limits.max_waiters} acquires wait for pool {request.pool!r} already")

    def _must_narrow(self, request: AcquireRequest) -> bool:
        return request.allow_network is False and self.spec.slots_have_network

    def serve(self) -> None:
        """Let the book assign, and answer those it served."""
        for waiter in self._book.assign():
            if self._must_narrow(waiter.request):
                self._narrowing.add(waiter.seq)
                task = asyncio.create_task(self._narrow_first(waiter))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            else:
                self._answer(waiter, None)

    def refuse(self, waiter: Waiter, error: PoolServiceError) -> None:
        """It waits no more, and this is why."""
        self._book.abandon(waiter)
        self._answer(waiter, error)

    def _answer(self, waiter: Waiter, error: PoolServiceError | None) -> None:
        future = self._answers.get(waiter.seq)
        if future is None:
            if error is None:
                return  # served in the very step that queued it: `answer` finds the leases
            future = self._answers[waiter.seq] = asyncio.get_running_loop().create_future()
        if not future.done():
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

    async def answer(self, waiter: Waiter) -> Acquired:
        """Wait for what becomes of a queued waiter.

        Raises:
            PoolServiceError: what it was refused with.
        """
        try:
            if not waiter.leases or waiter.seq in self._narrowing or waiter.seq in self._answers:
                future = self._answers.get(waiter.seq)
                if future is None:
                    future = self._answers[waiter.seq] = asyncio.get_running_loop().create_future()
                await future
            await self._wiring.store.flush()
        except BaseException:
            self.give_back(waiter)
            raise
        finally:
            self._answers.pop(waiter.seq, None)
        waited_s = self._wiring.clock.monotonic() - waiter.arrived
        self._wiring.meter.observe("sandbox_acquire_seconds", waited_s, pool=waiter.request.pool)
        return Acquired(leases=waiter.leases, waited_s=waited_s)

    def give_back(self, waiter: Waiter) -> None:
        """Nobody takes the answer: leave the line, and release what was granted."""
        self._book.abandon(waiter)
        self.release_all(waiter.leases, "nobody took the answer to the acquire")

    def release_all(self, leases: tuple[Lease, ...], detail: str) -> None:
        """Release those of these leases that are still held."""
        for lease in leases:
            if lease.lease_id in self._book.held:
                self._book.release(lease.lease_id, detail=detail)
        self._work()

    async def _narrow_first(self, waiter: Waiter) -> None:
        leases = waiter.leases
        results = await asyncio.gather(*(self._narrow(lease) for lease in leases), return_exceptions=True)
        self._narrowing.discard(waiter.seq)
        errors = [error for error in results if isinstance(error, BaseException)]
        if not errors and all(lease.lease_id in self._book.held for lease in leases):
            self._answer(waiter, None)
            return
        waiter.leases = ()
        self.release_all(leases, "its network could not be taken away")
        unable = next((e for e in errors if isinstance(e, AgentRefused) and e.code in ("not_implemented", "invalid")), None)
        if unable is not None:
            self._answer(waiter, NotImplementedHere(f"the network cannot be taken away from a slot of this pool: {unable.detail}", field="allow_network"))
        elif waiter.seq not in self._answers:
            return  # nobody waits for it any more
        elif self._wiring.clock.monotonic() >= waiter.deadline:
            waited_s = waiter.deadline - waiter.arrived
            self._answer(waiter, NoCapacity("the network could not be taken away from a slot in time", queue_position=1, waited_s=waited_s))
        else:
            self._book.requeue(waiter)
            self._work()

    async def _narrow(self, lease: Lease) -> None:
        link = self._sandboxes[lease.sandbox_id].link
        if link is None:
            raise LinkLost("the link went before the slot was narrowed")
        await link.request({"op": "narrow", "slot": lease.slot_id, "epoch": lease.epoch, "network": False})

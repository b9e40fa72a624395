"""One pool: holds its state, asks `plan`, lets keepers wait on the backend, and writes down what they saw.

Nothing here waits between reading the state and changing it: a method either decides in one step, or only waits for what a step decided.
"""

from __future__ import annotations

import asyncio
import logging

from sandbox_server.backends.base import Backend, CreateFailed
from sandbox_server.core.errors import BackendUnavailable, Draining, NoCapacity, PoolServiceError, SandboxLost
from sandbox_server.core.lifecycle import SandboxEvent
from sandbox_server.core.types import Acquired, AcquireRequest, Lease, LeaseState, PoolSpec, SandboxState, SlotRef, SlotState
from sandbox_server.link import AgentLink
from sandbox_server.pool import plan as planning
from sandbox_server.pool.ended import end_error
from sandbox_server.pool.granting import Granting
from sandbox_server.pool.holding import ResetOrder
from sandbox_server.pool.keeper import Keeper
from sandbox_server.pool.leases import LeaseBook
from sandbox_server.pool.looking import snapshot
from sandbox_server.pool.sandbox import HelloSeen, Sandbox, SlotSeen
from sandbox_server.pool.ticker import Ticker
from sandbox_server.pool.wiring import Wiring

log = logging.getLogger(__name__)

#: A sandbox that ends sooner than this counts as a failing creation, so that a crash loop backs off too.
SHORT_LIFE_S = 10.0
#: An agent that has not finished a reset by then never will.
RESET_LIMIT_S = 120.0


class Pool:
    """A named set of identical sandboxes.

    Args:
        name: the pool's name.
        spec: what it is made of.
        backend: where its sandboxes live.
        budget: how many creations that backend takes at once, shared by its pools.
        wiring: clock, store, timers, how to connect.
    """

    def __init__(self, name: str, spec: PoolSpec, backend: Backend, budget: asyncio.Semaphore, wiring: Wiring) -> None:
        self.name = name
        self.spec = spec
        self.book = LeaseBook(name, spec, wiring.clock, wiring.store.put, wiring.weight, wiring.lease_id)
        self.sandboxes: dict[str, Sandbox] = {}
        self.last_error: str | None = None
        self.hopeless: str | None = None
        self.closing = False
        self._backend = backend
        self._budget = budget
        self._wiring = wiring
        self._keepers: dict[str, Keeper] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._ticker = Ticker(self._tick, wiring.clock, wiring.timers)
        self._granting = Granting(self.book, self.sandboxes, spec, self.work, wiring)
        self._failures = 0
        self._retry_at = 0.0
        self.shown: HelloSeen | None = None

    # For callers.

    def start(self) -> None:
        """Begin to fill."""
        self._ticker.start()

    async def stop(self, *, destroy: bool) -> None:
        """Refuse and fail whoever waits, then destroy the sandboxes, or leave them to whoever adopts them."""
        self.closing = True
        for waiter in self.book.line.all():
            self._granting.refuse(waiter, Draining(f"pool {self.name!r} is going away"))
        self._ticker.stop()
        if destroy:
            for sandbox in list(self.sandboxes.values()):
                self._retire(sandbox, "the pool is going away")
        else:
            for task in self._tasks:
                task.cancel()
        await asyncio.gather(*self._tasks, *self._granting.tasks, return_exceptions=True)

    async def acquire(self, request: AcquireRequest) -> Acquired:
        """Wait for slots. A caller that is cancelled leaves the queue, or gives back what it had been granted.

        Raises:
            NoCapacity: nothing came free in time.
            BackendUnavailable: there is no hope of more slots, and too few to serve this.
            Draining: the pool is going away.
            InvalidRequest: the pool can never serve this.
            NotImplementedHere: the agent cannot narrow as asked.
        """
        if self.closing:
            raise Draining(f"pool {self.name!r} is going away")
        self._granting.refuse_impossible(request)
        # Once it is time to try again there is hope again, until that has failed too.
        is_hopeless = self.hopeless is not None and self._wiring.clock.monotonic() < self._retry_at
        if is_hopeless and request.count > self.book.table.usable():
            raise self._no_hope()
        wait_s = self.spec.acquire_timeout_s if request.wait_s is None else min(request.wait_s, self.spec.acquire_timeout_s)
        waiter = self.book.enqueue(request, wait_s)
        self.work()
        if waiter.waiting and wait_s <= 0:
            self._tick()  # grows the pool all the same, then refuses
        return await self._granting.answer(waiter)

    def release(self, lease_id: str, *, keep: bool) -> Lease:
        """End a held lease; its slot's reset runs behind."""
        lease = self.book.release(lease_id, keep=keep)
        self._lease_over(lease)
        self.work()
        return lease

    def release_run(self, tenant: str, run_id: str, *, keep: bool) -> list[str]:
        """End all leases of a run, and keep nothing for it any more unless `keep`."""
        lease_ids = self.book.lease_ids_of_run(tenant, run_id)
        for lease_id in lease_ids:
            self._lease_over(self.book.release(lease_id, keep=keep))
        if not keep:
            self.book.reclaim_run(tenant, run_id)
        self.work()
        return lease_ids

    def link_of(self, lease: Lease) -> AgentLink:
        """The link to the agent of a held lease.

        Raises:
            BackendUnavailable: the agent cannot be reached now; whether its sandbox is lost is being found out.
        """
        sandbox = self.sandboxes[lease.sandbox_id]
        if sandbox.link is None or not sandbox.reachable:
            raise BackendUnavailable(f"the agent of sandbox {lease.sandbox_id} cannot be reached at the moment", lease_id=lease.lease_id)
        return sandbox.link

    async def lost_verdict(self, lease_id: str) -> SandboxLost | None:
        """Wait until it is known whether this lease's sandbox is gone. None: it is there and its link is back, or the lease ended otherwise."""
        while True:
            holding = self.book.held.get(lease_id)
            if holding is None:
                ended = self.book.ended.get(lease_id)
                error = end_error(ended) if ended is not None else None
                return error if isinstance(error, SandboxLost) else None
            sandbox = self.sandboxes[holding.lease.sandbox_id]
            if sandbox.reachable:
                return None
            await sandbox.changed.wait()

    # Deciding.

    def work(self) -> None:
        """Serve whoever can be served, have reset what must be, and let the plan look again."""
        self._serve()
        self._ticker.kick()

    def _serve(self) -> None:
        self._granting.serve()
        orders, self.book.resets = self.book.resets, []
        for order in orders:
            sandbox = self.sandboxes[order.ref.sandbox_id]
            sandbox.idle_since = self._wiring.clock.monotonic()
            self._keepers[sandbox.sandbox_id].reset(order)

    def _tick(self) -> float:
        for lease in self.book.expire():
            self._wiring.meter.count("sandbox_leases_expired_total", pool=self.name)
            self._lease_over(lease)
        self._quarantine_stuck()
        self._serve()
        now = self._wiring.clock.monotonic()
        self._forgive(now)
        seen = self._snapshot()
        actions = planning.plan(seen, now)
        for action in actions:
            self._act(action)
        # Last, so that what was wanted in vain has been seen by the plan.
        self._refuse_overdue()
        return min(self.book.next_due(), planning.next_due(self._snapshot() if actions else seen, now))

    def _refuse_overdue(self) -> None:
        for waiter in self.book.overdue():
            position = self.book.line.position(waiter)
            waited_s = self._wiring.clock.monotonic() - waiter.arrived
            why = f" (the pool's last error: {self.last_error})" if self.last_error else ""
            detail = f"pool {self.name!r} had no {waiter.request.count} slots free in {waited_s:.3g} s{why}"
            self._granting.refuse(waiter, NoCapacity(detail, queue_position=position, waited_s=waited_s))

    def _act(self, action: planning.Action) -> None:
        if isinstance(action, planning.Create):
            self._create()
        elif isinstance(action, planning.Drain):
            self.drain(self.sandboxes[action.sandbox_id], action.why)
        else:
            self._retire(self.sandboxes[action.sandbox_id], action.why)

    def _snapshot(self) -> planning.Snapshot:
        return snapshot(self.spec, self.sandboxes.values(), self.book, self._retry_at, closing=self.closing)

    def _create(self) -> None:
        sandbox = Sandbox(sandbox_id=self._wiring.sandbox_id(), pool=self.name, created_wall=self._wiring.clock.wall())
        self.sandboxes[sandbox.sandbox_id] = sandbox
        self._wiring.store.put(sandbox.record())
        keeper = self._keepers[sandbox.sandbox_id] = Keeper(sandbox, self, self._backend, self._budget, self._wiring)
        task = asyncio.create_task(keeper.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def drain(self, sandbox: Sandbox, why: str) -> None:
        """No new leases there; the plan retires it when the last one ends."""
        sandbox.why = why
        sandbox.happen(SandboxEvent.DRAIN)
        if sandbox.sandbox_id in self.book.table.shelves:
            self.book.table.close(sandbox.sandbox_id)
        self._wiring.store.put(sandbox.record())
        self._ticker.kick()

    def _retire(self, sandbox: Sandbox, why: str) -> None:
        if sandbox.destroying:
            return
        if sandbox.state is not SandboxState.DRAINING:
            self.drain(sandbox, why)
        self._end_leases(sandbox, why)
        self._keepers[sandbox.sandbox_id].end()

    def _end_leases(self, sandbox: Sandbox, why: str) -> None:
        if sandbox.sandbox_id in self.book.table.shelves:
            for lease in self.book.remove_sandbox(sandbox.sandbox_id, why):
                self._lease_over(lease)
        sandbox.wake()

    def _lease_over(self, lease: Lease) -> None:
        level = logging.DEBUG if lease.state is LeaseState.RELEASED else logging.INFO
        fields = {"lease_id": lease.lease_id, "pool": self.name, "tenant": lease.tenant, "run_id": lease.run_id, "sandbox_id": lease.sandbox_id}
        log.log(level, "lease ended: %s", lease.end_detail, extra=fields)

    def _quarantine_stuck(self) -> None:
        if not self.book.table.counts[SlotState.RESETTING]:
            return
        late = self._wiring.clock.monotonic() - RESET_LIMIT_S
        for slot in [slot for slot in self.book.table if slot.state is SlotState.RESETTING and slot.since <= late]:
            self.reset_done(slot.ref, slot.epoch, f"its reset did not end within {RESET_LIMIT_S:g} s")

    def _forgive(self, now: float) -> None:
        if self._failures and any(s.state is SandboxState.READY and now - (s.ready_at or now) >= SHORT_LIFE_S for s in self.sandboxes.values()):
            self._failures = 0

    def _no_hope(self) -> PoolServiceError:
        return BackendUnavailable(f"pool {self.name!r} cannot make sandboxes: {self.hopeless}")

    # What keepers saw.

    def sandbox_changed(self, sandbox: Sandbox) -> None:
        """There is a new checkpoint to record."""
        self._wiring.store.put(sandbox.record())

    def sandbox_connected(self, sandbox: Sandbox, link: AgentLink, hello: HelloSeen) -> None:
        """Its agent answers, for the first time or again."""
        sandbox.link, sandbox.boot, sandbox.isolation = link, hello.boot, hello.isolation
        self.shown = hello
        self.book.exclusive = hello.isolation == "none"
        self._granting.capabilities = hello.capabilities
        if sandbox.state is SandboxState.STARTING:
            sandbox.happen(SandboxEvent.CONNECT)
            sandbox.ready_at = sandbox.idle_since = self._wiring.clock.monotonic()
            self.last_error = self.hopeless = None
            self._wiring.meter.count("sandbox_backend_calls_total", backend=self.spec.backend, op="create", outcome="ok")
        if sandbox.sandbox_id not in self.book.table.shelves:
            self.book.add_sandbox(sandbox.sandbox_id)
        if sandbox.state is SandboxState.READY:
            self.book.table.open(sandbox.sandbox_id)
        self._reset_again(sandbox)
        self._wiring.store.put(sandbox.record())
        sandbox.wake()
        self.work()

    def _reset_again(self, sandbox: Sandbox) -> None:
        """What was being reset when the link went; asking twice for one epoch is asking once."""
        for slot in self.book.table.shelves[sandbox.sandbox_id].slots.values():
            if slot.state is SlotState.RESETTING and not slot.fresh:
                self.book.resets.append(ResetOrder(ref=slot.ref, epoch=slot.epoch, keep=slot.keep is not None))

    def sandbox_unreachable(self, sandbox: Sandbox) -> None:
        """The link is gone; whether the sandbox is, is being found out. Nothing is leased there meanwhile."""
        self.book.table.close(sandbox.sandbox_id)
        sandbox.wake()

    def sandbox_failed(self, sandbox: Sandbox, error: Exception) -> None:
        """It could not be made, or has ended."""
        now = self._wiring.clock.monotonic()
        created = sandbox.ready_at is not None
        self.last_error = sandbox.why = str(error)
        if not created:
            self._wiring.meter.count("sandbox_backend_calls_total", backend=self.spec.backend, op="create", outcome="failed")
        if (not created or now - (sandbox.ready_at or now) < SHORT_LIFE_S) and now >= self._retry_at:
            self._failures += 1
            self._retry_at = now + planning.backoff_s(self._failures, self._wiring.jitter)
        sandbox.happen(SandboxEvent.FAIL)
        self._end_leases(sandbox, str(error))
        if isinstance(error, CreateFailed) and error.hopeless:
            self.hopeless = error.detail
            self._retry_at = now + planning.BACKOFF_MAX_S
            for waiter in self.book.line.all():
                if waiter.request.count > self.book.table.usable():
                    self._granting.refuse(waiter, self._no_hope())
        log.warning("sandbox failed: %s", error, extra={"pool": self.name, "sandbox_id": sandbox.sandbox_id})
        self._wiring.store.put(sandbox.record())
        self.work()

    def sandbox_gone(self, sandbox: Sandbox) -> None:
        """The backend says that nothing of it is left."""
        sandbox.happen(SandboxEvent.DESTROY)
        del self.sandboxes[sandbox.sandbox_id], self._keepers[sandbox.sandbox_id]
        self._wiring.store.put(sandbox.record())
        self._ticker.kick()

    def slots_seen(self, sandbox: Sandbox, slots: list[SlotSeen]) -> None:
        """Its agent shows slots."""
        if sandbox.sandbox_id not in self.book.table.shelves:
            return  # retired while the agent spoke
        for seen in slots:
            self._slot_seen(sandbox, seen)
        self.work()

    def _slot_seen(self, sandbox: Sandbox, seen: SlotSeen) -> None:
        shelf = self.book.table.shelves[sandbox.sandbox_id]
        if seen.ref.slot_id not in shelf.slots and len(shelf.slots) >= self.spec.slots_per_sandbox:
            log.warning("an agent shows more slots than it was given", extra={"sandbox_id": sandbox.sandbox_id, "pool": self.name})
            return
        slot = self.book.slot_seen(seen.ref, max(seen.epoch, 1), seen.workspace, seen.isolation or sandbox.isolation)
        detail = seen.detail or f"its agent says that it is {seen.state}"
        if seen.state == "quarantined" or (seen.state == "broken" and slot.fresh):
            self.reset_done(seen.ref, slot.epoch, detail)
        elif seen.state == "broken" and seen.epoch == slot.epoch:
            lease = self.book.broken(seen.ref, f"the slot's own init died: {detail}")
            if lease is not None:
                self._lease_over(lease)
        elif seen.state == "ready":
            self.book.cleaned(seen.ref, seen.epoch)

    def reset_done(self, ref: SlotRef, epoch: int, problem: str | None) -> None:
        """A reset has ended, proven clean unless there is a problem."""
        slot = self.book.table.get(ref)
        if slot is None or slot.epoch != epoch:
            return
        if problem is None:
            self.book.cleaned(ref, epoch)
        else:
            self._wiring.meter.count("sandbox_slot_dirty_total", pool=self.name)
            log.warning("slot in quarantine: %s", problem, extra={"pool": self.name, "sandbox_id": ref.sandbox_id, "slot_id": ref.slot_id})
            lease = self.book.dirty(ref, problem)
            if lease is not None and lease.state is LeaseState.SANDBOX_LOST:
                self._lease_over(lease)
        self.work()

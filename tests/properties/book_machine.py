"""A random state machine for the lease book, and a model of what the lease book promises.

The model does not look at how the book decides: it checks, after every step, who holds what, and at every grant, whether it was that waiter's turn.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sandbox_server.core.types import AcquireRequest, Lease, LeaseState, PoolId, PoolSpec, SandboxState, SlotRef, SlotState
from sandbox_server.pool.leasing.lease_book import LeaseBook
from sandbox_server.pool.leasing.serving_order import WAIT_FOR_KEPT_SLOT_S
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S
from sandbox_server.pool.leasing.wait_queue import Waiter
from sandbox_server.store.base import SandboxRecord
from sandbox_server.store.memory import MemoryStore
from sandbox_server.testing import FakeClock
from tests.properties.claim_model import ClaimModel

TENANTS = ("a", "b", "c")
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 1.0}
RUNS = (None, "r1", "r2")
MANY = 1000


@dataclass
class Busy:
    """A held lease in the model."""

    lease: Lease
    deadline: float
    running: int = 0
    quiet: float | None = None

    @property
    def ends(self) -> float:
        """When it must expire, monotonic."""
        if self.running:
            return float("inf")
        return max(self.deadline, (self.quiet + 60) if self.quiet is not None else 0)


class BookMachine(RuleBasedStateMachine):
    """Uses a `LeaseBook` as a pool does, including crashes of the service."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = itertools.count()
        self.used_ids: set[str] = set()
        self.highest_epoch: Counter[SlotRef] = Counter()

    @initialize(slots=st.lists(st.integers(2, 4), min_size=1, max_size=3))
    def begin(self, slots: list[int]) -> None:
        self.clock = FakeClock()
        self.store = MemoryStore(durable=True)
        self.held: dict[str, Busy] = {}
        self.waiting: list[Waiter] = []
        self.known_slots: set[SlotRef] = set()
        self.dirty: set[SlotRef] = set()
        self.max_leases: dict[str, int | None] = dict.fromkeys(TENANTS)
        self.capacity = MANY
        self.book = self._new_book()
        for count in slots:
            self._add_sandbox(count, clean=True)

    def _new_book(self) -> LeaseBook:
        book = LeaseBook(
            *(PoolId("p"), PoolSpec(), self.clock, self.store.put, WEIGHTS.__getitem__, lambda: f"l-{next(self.ids)}"),
            admits=lambda request: self._admits(request, book.lease_count_by_tenant),
            capacity=lambda: self.capacity,
        )
        self.claims = ClaimModel(CLAIM_AFTER_S, len(TENANTS), self.clock.monotonic, self._may_claim)
        return book

    def _admits(self, request: AcquireRequest, leased: Counter[str]) -> bool:
        most = self.max_leases[request.tenant]
        return most is None or leased[request.tenant] + request.count <= most

    def _may_claim(self, waiter: Waiter, leased: Counter[str]) -> bool:
        return self._admits(waiter.request, leased) and waiter.request.count <= self.capacity - leased[waiter.request.tenant]

    def _has(self, waiter: Waiter) -> int:
        """Return how many slots a waiter could be granted now: free ones, and those that are kept for its run."""
        holder, open_slots = (waiter.request.tenant, waiter.request.run_id), [slot for slot in self.book.table if self._is_open(slot.ref)]
        return sum(slot.state is SlotState.READY or (slot.state is SlotState.KEPT and holder[1] is not None and slot.keep == holder) for slot in open_slots)

    def _is_open(self, ref: SlotRef) -> bool:
        return not self.book.table.slots_by_sandbox[ref.sandbox_id].is_cordoned

    # What the pool does after every step.

    def _assign(self) -> None:
        while True:
            leased = Counter(self.book.lease_count_by_tenant)
            usable = self.book.table.usable()
            self.claims.look(self.waiting, leased, self._has)
            self.claims.begin_assigning(self._has)
            served = self.book.assign_slots()
            for number, waiter in enumerate(served):
                self._check_turn(waiter, leased, usable, still_waiting=[other for other in self.waiting if other not in served[: number + 1]])
                self.claims.granted(waiter)
                self.waiting.remove(waiter)
                leased[waiter.request.tenant] += waiter.request.count
                self.claims.look(self.waiting, leased, self._has)
                self._granted(waiter)
            assert self.book.claims.claimant is self.claims.claimant, "slots are held for somebody else than who has waited longest"
            self.claims.end_assigning(self._has)
            if not served:
                return

    def _turns(self) -> dict[str, list[Waiter]]:
        """Return the waiters of each tenant in the order in which they are served."""
        turns: dict[str, list[Waiter]] = {}
        for waiter in sorted(self.waiting, key=lambda waiter: (-waiter.request.priority, waiter.seq)):
            turns.setdefault(waiter.request.tenant, []).append(waiter)
        return turns

    def _check_turn(self, waiter: Waiter, leased: Counter[str], usable: int, still_waiting: list[Waiter]) -> None:
        """Check the order of serving.

        Within a tenant, waiters are served in order. Among tenants, the claimant comes first, then the tenant with the fewest leases in proportion to
        its weight, and the others only up to their share.
        """
        tenant = waiter.request.tenant
        turns = self._turns()
        assert turns[tenant][0] is waiter, "somebody overtook the head of its tenant"
        assert self._admits(waiter.request, leased), "served beyond its tenant's own limit"
        load = leased[tenant] / WEIGHTS[tenant]
        heads = [turns[other][0] for other in turns if other != tenant and leased[other] / WEIGHTS[other] < load]
        ahead = [head for head in heads if head in still_waiting and head.waiting and self._admits(head.request, leased)]
        kept = [lease for lease in waiter.leases if lease.workspace_kept]
        if ahead and len(kept) < waiter.request.count and waiter is not self.claims.claimant:
            active = {name for name, count in leased.items() if count} | set(turns)
            share = usable * WEIGHTS[tenant] / sum(WEIGHTS[name] for name in active)
            assert leased[tenant] + waiter.request.count <= share + 1e-9, "served past its share while another tenant's head waits"

    def _granted(self, waiter: Waiter) -> None:
        request = waiter.request
        assert len(waiter.leases) == request.count, "a gang is all or nothing"
        assert len({lease.slot for lease in waiter.leases}) == request.count
        for lease in waiter.leases:
            assert lease.lease_id not in self.used_ids, "a lease id was used again"
            assert lease.slot not in {busy.lease.slot for busy in self.held.values()}, "two holders"
            assert lease.slot not in self.dirty, "a quarantined slot was leased"
            assert lease.epoch > self.highest_epoch[lease.slot], "an epoch was used again"
            self.used_ids.add(lease.lease_id)
            self.highest_epoch[lease.slot] = lease.epoch
            self.held[lease.lease_id] = Busy(lease, self.clock.monotonic() + request.ttl_s)

    # The rules. Hypothesis chooses each rule with the same probability, so the failures share a few rules: most steps are ordinary use.

    @rule(
        requests=st.lists(
            st.builds(
                AcquireRequest,
                tenant=st.sampled_from(TENANTS),
                pool=st.just("p"),
                count=st.sampled_from((1, 1, 1, 2, 2, 5)),
                run_id=st.sampled_from(RUNS),
                priority=st.sampled_from((0, 0, 1)),
                ttl_s=st.sampled_from((5.0, 100.0, 1000.0)),
            ),
            min_size=1,
            max_size=3,
        )
    )
    def acquire(self, requests: list[AcquireRequest]) -> None:
        for request in requests:
            self.waiting.append(self.book.enqueue(request, wait_s=150.0))
            self.claims.look(self.waiting, self.book.lease_count_by_tenant, self._has)
            self._assign()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans(), clean=st.booleans())
    def release(self, data: st.DataObject, keep: bool, clean: bool) -> None:
        """Release some leases, and end the reset of most of their slots before the next step."""
        for lease_id in data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True, min_size=1)):
            lease = self.book.release_lease(lease_id, keep=keep)
            assert lease.state is LeaseState.RELEASED
            del self.held[lease_id]
            slot = self.book.table.get(lease.slot)
            assert slot is not None
            if clean:
                assert self.book.mark_clean(slot.ref, slot.epoch)
            self._assign()

    @precondition(lambda self: self._resetting())
    @rule(data=st.data(), how=st.sampled_from(("all", "all", "one", "dirty", "late")))
    def resets_end(self, data: st.DataObject, how: str) -> None:
        refs = self._resetting() if how == "all" else [data.draw(st.sampled_from(self._resetting()))]
        for ref in refs:
            slot = self.book.table.get(ref)
            assert slot is not None
            if how == "late":
                assert not self.book.mark_clean(ref, slot.epoch - 1), "a reset of an older epoch counted"
            elif how == "dirty" and len(self.dirty) < 2:
                self.book.quarantine_slot(ref, "not proven")
                self.dirty.add(ref)
            else:
                assert self.book.mark_clean(ref, slot.epoch)
        self._assign()

    def _resetting(self) -> list[SlotRef]:
        return sorted((slot.ref for slot in self.book.table if slot.state is SlotState.RESETTING), key=repr)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), what=st.sampled_from(("renew", "start", "start", "end")), ttl=st.sampled_from((1.0, 50.0, 500.0)))
    def use(self, data: st.DataObject, what: str, ttl: float) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.held)))
        busy = self.held[lease_id]
        if what == "renew":
            before = busy.lease.expires_at
            busy.lease = self.book.renew_lease(lease_id, ttl)
            busy.deadline = max(busy.deadline, self.clock.monotonic() + ttl)
            assert busy.lease.expires_at >= before - 1e-6, "a renewal shortened a lease"
        elif what == "start":
            busy.running += 1
            self.book.record_call_start(lease_id)
        elif busy.running:
            busy.running -= 1
            busy.quiet = self.clock.monotonic()
            self.book.record_call_end(lease_id)

    @rule(seconds=st.sampled_from((0.5, 4.0, 6.0, 30.0, 61.0, 200.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.pass_time(seconds)
        expired = {lease.lease_id for lease in self.book.expire_leases()}
        due = {lease_id for lease_id, busy in self.held.items() if busy.ends <= self.clock.monotonic()}
        assert expired == due, "a lease ended early, or late"
        for lease_id in expired:
            del self.held[lease_id]
        late = self.book.overdue_waiters()
        assert set(map(id, late)) == {id(waiter) for waiter in self.waiting if waiter.deadline <= self.clock.monotonic()}
        for waiter in late:
            self.waiting.remove(waiter)
            self.book.remove_waiter(waiter)
            self.claims.changed(self.waiting)
        for slot in self.book.table:
            assert slot.state is not SlotState.KEPT or slot.since + 60 > self.clock.monotonic(), "kept for more than a minute"
        self._assign()

    @rule(data=st.data(), what=st.sampled_from(("hang_up", "undo", "init", "add", "open", "close", "lose", "crash", "limit", "shrink")))
    def disturb(self, data: st.DataObject, what: str) -> None:
        getattr(self, f"_{what}")(data)
        self._assign()

    def _limit(self, data: st.DataObject) -> None:
        """Change the limits of a tenant, as a reload of the settings does."""
        self.max_leases[data.draw(st.sampled_from(TENANTS))] = data.draw(st.sampled_from((None, None, 1, 3)))

    def _shrink(self, data: st.DataObject) -> None:
        """Reduce the capacity of the pool, or restore it."""
        self.capacity = data.draw(st.sampled_from((2, 5, MANY)))

    def _hang_up(self, data: st.DataObject) -> None:
        if self.waiting:
            waiter = data.draw(st.sampled_from(self.waiting))
            self.waiting.remove(waiter)
            self.book.remove_waiter(waiter)

    def _undo(self, data: st.DataObject) -> None:
        """Fail to prepare the slots of a grant: the leases are released, and the waiter returns to its old position."""
        waiter = self.book.enqueue(AcquireRequest(tenant=data.draw(st.sampled_from(TENANTS)), pool="p"), wait_s=150.0)
        self.waiting.append(waiter)
        self.claims.look(self.waiting, self.book.lease_count_by_tenant, self._has)
        self._assign()
        if waiter in self.waiting:
            return
        for lease in waiter.leases:
            self.book.release_lease(lease.lease_id)
            del self.held[lease.lease_id]
        self.book.requeue_waiter(waiter)
        self.waiting.append(waiter)

    def _init(self, data: st.DataObject) -> None:
        """End the init process of a held slot."""
        if self.held:
            lease_id = data.draw(st.sampled_from(sorted(self.held)))
            lease = self.book.reset_broken_slot(self.held.pop(lease_id).lease.slot, "killed", {})
            assert lease is not None
            assert (lease.lease_id, lease.state) == (lease_id, LeaseState.SANDBOX_LOST)

    def _add(self, data: st.DataObject) -> None:
        if len(self.book.table.slots_by_sandbox) < 4:
            self._add_sandbox(data.draw(st.integers(1, 3)), clean=data.draw(st.booleans()))

    def _add_sandbox(self, count: int, *, clean: bool) -> None:
        sandbox_id = f"s-{next(self.ids)}"
        self.store.put(SandboxRecord(sandbox_id=sandbox_id, pool="p", state=SandboxState.READY, handle=None, created_at=0.0))
        self.book.add_sandbox(sandbox_id)
        for number in range(count):
            ref = SlotRef(sandbox_id=sandbox_id, slot_id=str(number))
            self.book.observe_slot(ref, 1, "/workspace", "bwrap")
            self.known_slots.add(ref)
            if clean:
                assert self.book.mark_clean(ref, 1)

    def _open(self, data: st.DataObject) -> None:
        for sandbox_id in self.book.table.slots_by_sandbox:
            self.book.table.uncordon_sandbox(sandbox_id)

    def _close(self, data: st.DataObject) -> None:
        """Cordon a sandbox, as if it drained or could not be reached."""
        if self.book.table.slots_by_sandbox:
            self.book.table.cordon_sandbox(data.draw(st.sampled_from(sorted(self.book.table.slots_by_sandbox))))

    def _lose(self, data: st.DataObject) -> None:
        """Remove a sandbox, as if it had died."""
        if not self.book.table.slots_by_sandbox:
            return
        sandbox_id = data.draw(st.sampled_from(sorted(self.book.table.slots_by_sandbox)))
        lost = {lease.lease_id for lease in self.book.remove_sandbox(sandbox_id, "killed")}
        assert lost == {lease_id for lease_id, busy in self.held.items() if busy.lease.sandbox_id == sandbox_id}
        self.store.put(SandboxRecord(sandbox_id=sandbox_id, pool="p", state=SandboxState.GONE, handle=None, created_at=0.0))
        for lease_id in lost:
            del self.held[lease_id]
        self.known_slots = {ref for ref in self.known_slots if ref.sandbox_id != sandbox_id}

    def _crash(self, data: st.DataObject) -> None:
        """Restart the service from its records: held leases continue, and the queue is empty."""
        self.clock.pass_time(data.draw(st.sampled_from((0.0, 3.0, 1000.0))))
        self.waiting.clear()
        self.book = self._new_book()
        state = self.store.load()
        for sandbox in state.sandboxes:
            self.book.add_sandbox(sandbox.sandbox_id)
        self.book.restore_leases(state.slots, state.leases)
        assert set(self.book.held) == set(self.held), "a crash lost or made a lease"
        for lease_id, busy in self.held.items():
            busy.running, busy.quiet = 0, None
            busy.lease = self.book.held[lease_id].lease
            busy.deadline = self.book.held[lease_id].deadline
            assert busy.deadline >= self.clock.monotonic() + min(busy.lease.ttl_s, 60) - 1e-6, "no grace after downtime"
        ordered = {order.ref: order.epoch for order in self.book.resets}
        for ref in self._resetting():
            slot = self.book.table.get(ref)
            assert slot is not None
            assert slot.fresh or ordered.get(ref) == slot.epoch, "a slot between two holders would never be reset"

    # The invariants after every step.

    @invariant()
    def the_book_agrees_with_itself(self) -> None:
        if not hasattr(self, "book"):
            return
        table = self.book.table
        slots = list(table)
        assert {slot.ref for slot in slots} == self.known_slots, "a slot was lost"
        assert Counter(slot.state for slot in slots) == +table.counts
        assert table.free_count == sum(1 for slot in slots if slot.state is SlotState.READY and not table.slots_by_sandbox[slot.ref.sandbox_id].is_cordoned)
        assert {slot.lease_id for slot in slots if slot.state is SlotState.LEASED} == set(self.book.held) == set(self.held)
        assert all(slot.lease_id is None for slot in slots if slot.state is not SlotState.LEASED)
        assert {slot.ref for slot in slots if slot.state is SlotState.QUARANTINED} == self.dirty & self.known_slots
        assert +self.book.lease_count_by_tenant == Counter(busy.lease.tenant for busy in self.held.values())
        assert self.book.queue.slots_wanted == sum(waiter.request.count for waiter in self.waiting)

    @invariant()
    def nobody_waits_for_what_is_free(self) -> None:
        """Check that the first waiter in the serving order does not wait while enough slots are free for it."""
        if not hasattr(self, "book") or not self.waiting:
            return
        heads = [waiters[0] for waiters in self._turns().values() if self._admits(waiters[0].request, self.book.lease_count_by_tenant)]
        if not heads:
            return
        first = min(heads, key=lambda waiter: (self.book.lease_count_by_tenant[waiter.request.tenant] / WEIGHTS[waiter.request.tenant], waiter.seq))
        about_to_be_kept = first.request.run_id and any(
            slot.state is SlotState.RESETTING
            and slot.keep == (first.request.tenant, first.request.run_id)
            and slot.since + WAIT_FOR_KEPT_SLOT_S > self.clock.monotonic()
            for slot in self.book.table
        )
        kept = len(self.book.order.kept_for(first.request))
        assert self.claims.claimant or self._has(first) < first.request.count or (about_to_be_kept and kept < first.request.count)

    @invariant()
    def the_store_knows(self) -> None:
        if not hasattr(self, "book"):
            return
        for slot in self.book.table:
            record = self.store.slots[slot.ref]
            assert (record.state, record.epoch, record.keep) == (slot.state, slot.epoch, slot.keep)
        for lease_id, busy in self.held.items():
            assert self.store.leases[lease_id] == busy.lease == self.book.held[lease_id].lease

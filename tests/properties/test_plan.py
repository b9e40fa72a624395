"""A pool that follows the plan alone, with a backend that behaves at random: checks every decision and every state."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox_server.core.types import PoolSpec, SandboxState
from sandbox_server.pool.fleet.plan import Create, Drain, Retire, SandboxSnapshot, Snapshot, next_due, plan

SPECS = st.builds(
    lambda slots, low, more, warm: PoolSpec(
        slots_per_sandbox=slots, min_sandboxes=low, max_sandboxes=low + more, warm_slots=warm, idle_timeout_s=10, max_lifetime_s=100, max_lease_s=50
    ),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(0, 5),
)


class Simulation:
    """Sandboxes as the plan sees them. The actions of the plan and the random behaviour of a backend change them."""

    def __init__(self, spec: PoolSpec) -> None:
        self.spec = spec
        self.now = 0.0
        self.sandboxes: dict[str, SandboxSnapshot] = {}
        self.wanted = 0
        self.retry_at = 0.0
        self.closing = False
        self.made = 0

    def snapshot(self) -> Snapshot:
        return Snapshot(spec=self.spec, sandboxes=list(self.sandboxes.values()), slots_wanted=self.wanted, retry_at=self.retry_at, closing=self.closing)

    def tick(self) -> None:
        for action in plan(self.snapshot(), self.now):
            self.act(action)
        assert len(self.sandboxes) <= self.spec.max_sandboxes, "past max_sandboxes"

    def act(self, action: Create | Drain | Retire) -> None:
        if isinstance(action, Create):
            assert not self.closing
            assert self.now >= self.retry_at, "created while backing off"
            self.made += 1
            name = f"s-{self.made}"
            self.sandboxes[name] = SandboxSnapshot(sandbox_id=name, state=SandboxState.STARTING)
            return
        seen = self.sandboxes[action.sandbox_id]
        if isinstance(action, Drain):
            assert seen.state in (SandboxState.STARTING, SandboxState.READY)
            self.sandboxes[action.sandbox_id] = replace(seen, state=SandboxState.DRAINING)
        else:
            assert not seen.destroying, "retired twice"
            assert seen.leased == 0 or action.ends_leases, "a lease was cut off"
            self.sandboxes[action.sandbox_id] = replace(seen, destroying=True, state=SandboxState.DRAINING, leased=0)

    def happen(self, what: str, which: int, amount: float) -> None:
        """Change the pool or one of its sandboxes at random."""
        if what == "time":
            self.now += amount
        elif what == "want":
            self.wanted = int(amount) % (self.spec.max_slots + 1)
        elif what == "backoff":
            self.retry_at = self.now + amount
        elif what == "close":
            self.closing = self.closing or amount > 95
        elif self.sandboxes:
            name = sorted(self.sandboxes)[which % len(self.sandboxes)]
            changed = self.change(self.sandboxes[name], what)
            if changed is None:
                del self.sandboxes[name]
            else:
                self.sandboxes[name] = changed

    def change(self, seen: SandboxSnapshot, what: str) -> SandboxSnapshot | None:
        """Return a possible next state of a sandbox; None if the backend has destroyed it."""
        if what == "gone":
            return None if seen.destroying else seen
        if what == "fail" and not seen.destroying:
            return replace(seen, state=SandboxState.FAILED, destroying=True, leased=0, ready=0, idle_since=None)
        if what == "up" and seen.state is SandboxState.STARTING:
            return replace(seen, state=SandboxState.READY, ready=self.spec.slots_per_sandbox, ready_at=self.now, idle_since=self.now)
        if seen.state is not SandboxState.READY:
            return seen
        if what == "lease" and seen.ready:
            self.wanted = max(0, self.wanted - 1)
            return replace(seen, ready=seen.ready - 1, leased=seen.leased + 1, idle_since=None)
        if what == "end" and seen.leased:
            return replace(seen, ready=seen.ready + 1, leased=seen.leased - 1, idle_since=self.now if seen.leased == 1 else None)
        if what == "dirty" and seen.ready:
            return replace(seen, ready=seen.ready - 1, quarantined=seen.quarantined + 1)
        return seen


EVENTS = st.tuples(
    st.sampled_from(("time", "want", "backoff", "close", "gone", "gone", "fail", "up", "up", "lease", "end", "dirty")), st.integers(0, 7), st.floats(0, 100)
)


@settings(max_examples=300, deadline=None)
@given(spec=SPECS, events=st.lists(EVENTS, max_size=60))
def test_never_past_the_maximum_never_twice_and_no_lease_cut_off(spec, events):
    simulation = Simulation(spec)
    for event in events:
        simulation.tick()
        simulation.happen(*event)
    simulation.tick()


@settings(max_examples=200, deadline=None)
@given(spec=SPECS, events=st.lists(EVENTS, max_size=40), wanted=st.integers(0, 20))
def test_left_alone_with_a_working_backend_it_comes_to_rest_with_what_is_wanted(spec, events, wanted):
    simulation = Simulation(spec)
    for event in events:
        simulation.tick()
        simulation.happen(*event)
    simulation.closing = False
    simulation.now += 1000
    simulation.wanted = wanted = min(wanted, spec.max_slots)
    for _ in range(20):
        simulation.tick()
        for name, seen in list(simulation.sandboxes.items()):
            if seen.state is SandboxState.STARTING:
                simulation.sandboxes[name] = simulation.change(seen, "up")
            elif seen.destroying:
                del simulation.sandboxes[name]
            elif seen.leased:
                simulation.sandboxes[name] = replace(seen, leased=0, ready=seen.ready + seen.leased, idle_since=simulation.now)
    before = dict(simulation.sandboxes)

    simulation.tick()

    assert simulation.sandboxes == before, "it does not come to rest"
    ready = sum(seen.ready for seen in before.values())
    assert ready >= min(wanted + spec.warm_slots, len(before) * spec.slots_per_sandbox - sum(seen.quarantined for seen in before.values()))
    assert len(before) >= spec.min_sandboxes
    if len(before) < spec.max_sandboxes:
        assert ready >= wanted + spec.warm_slots


@settings(max_examples=100, deadline=None)
@given(spec=SPECS, events=st.lists(EVENTS, max_size=40))
def test_it_says_when_to_look_again(spec, events):
    """The plan decides nothing new before `next_due` while the pool does not change."""
    simulation = Simulation(spec)
    for event in events:
        simulation.tick()
        simulation.happen(*event)
    simulation.tick()
    simulation.tick()
    due = next_due(simulation.snapshot(), simulation.now)

    until = min(due - 0.001, simulation.now + 10_000)

    assert until < simulation.now or plan(simulation.snapshot(), until) == []

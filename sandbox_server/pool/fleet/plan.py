"""What a pool should do about its sandboxes, decided from a snapshot alone.

`plan` decides, and the pool carries the actions out before it takes the next snapshot. Sandboxes whose creation is under way are in the snapshot as
STARTING, and those that are being destroyed stay in it until the backend has nothing of them any more. So a pool never exceeds `max_sandboxes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import ceil

from sandbox_server.core.types import PoolSpec, SandboxState

BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
#: A sandbox is replaced once this part of its slots is in quarantine.
QUARANTINED_PART = 0.25
#: The fields of a spec that concern the pool alone: counts, timeouts, who may use it. A change of any other field needs new sandboxes.
IN_PLACE = frozenset(
    {
        "min_sandboxes", "max_sandboxes", "warm_slots", "idle_timeout_s", "max_lifetime_s", "max_lease_s", "min_lease_life_s", "acquire_timeout_s",
        "default_timeout_s", "max_timeout_s", "on_shutdown", "delete_after_idle_s", "shared",
    }
)  # fmt: skip
_NEEDS_NEW_SANDBOXES = tuple(field.name for field in fields(PoolSpec) if field.name not in IN_PLACE)


def is_outdated(made_with: PoolSpec, spec: PoolSpec) -> bool:
    """Whether a sandbox that was created from one spec cannot serve a pool with another.

    Args:
        made_with: the spec of the sandbox.
        spec: the spec of the pool.
    """
    if made_with is spec:
        return False  # As long as the spec of the pool has not changed, which is nearly always.
    return any(getattr(made_with, name) != getattr(spec, name) for name in _NEEDS_NEW_SANDBOXES)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSnapshot:
    """What the plan has to know about one sandbox. All times are monotonic.

    Attributes:
        sandbox_id: its id.
        state: its state.
        ready: how many of its slots are ready.
        leased: how many are leased.
        coming: how many are being started or reset.
        kept: how many are kept for a run; a waiter may take them over.
        quarantined: how many are in quarantine.
        ready_at: when its agent answered for the first time; None before.
        idle_since: since when no slot is leased or kept; None while one is.
        ends_at: when its backend ends it by itself; None if the backend does not.
        destroying: whether it is being destroyed.
        outdated: whether it was created from another spec than the pool's.
        max_lifetime_s: the value of the spec that it was created from.
        max_lease_s: the value of the spec that it was created from.
    """

    sandbox_id: str
    state: SandboxState
    ready: int = 0
    leased: int = 0
    coming: int = 0
    kept: int = 0
    quarantined: int = 0
    ready_at: float | None = None
    idle_since: float | None = None
    ends_at: float | None = None
    destroying: bool = False
    outdated: bool = False
    max_lifetime_s: float = float("inf")
    max_lease_s: float = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A pool at one moment.

    Attributes:
        spec: its spec.
        sandboxes: its sandboxes.
        slots_wanted: how many slots its waiters want.
        retry_at: the earliest monotonic time of the next creation, after failed ones.
        closing: whether the pool is to have no sandboxes any more.
    """

    spec: PoolSpec
    sandboxes: Sequence[SandboxSnapshot] = ()
    slots_wanted: int = 0
    retry_at: float = 0.0
    closing: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Create one sandbox."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Give a sandbox no new leases."""

    sandbox_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Destroy a sandbox. It has no leases, unless `ends_leases` is set: then its time is over whatever runs in it."""

    sandbox_id: str
    reason: str
    ends_leases: bool = False


Action = Create | Drain | Retire


def plan(snapshot: Snapshot, now: float) -> list[Action]:
    """Decide what to do now, in order.

    Args:
        snapshot: the pool, with everything that is under way.
        now: the monotonic time.
    """
    actions: list[Action] = []
    drained: set[str] = set()
    for sandbox in snapshot.sandboxes:
        action = _end_of_life(snapshot, sandbox, now)
        if action is not None:
            actions.append(action)
            drained.add(sandbox.sandbox_id)
    staying = [s for s in snapshot.sandboxes if s.sandbox_id not in drained and s.state in (SandboxState.STARTING, SandboxState.READY)]
    too_many = len(staying) - snapshot.spec.max_sandboxes
    if too_many > 0:
        staying.sort(key=lambda s: (s.leased, s.kept, s.state is SandboxState.READY))
        actions.extend(Drain(s.sandbox_id, f"more than max_sandboxes of {snapshot.spec.max_sandboxes}") for s in staying[:too_many])
        del staying[:too_many]
    if not snapshot.closing:
        lacking = _missing_sandbox_count(snapshot, staying)
        if lacking > 0 and now >= snapshot.retry_at:
            actions.extend(Create() for _ in range(min(lacking, snapshot.spec.max_sandboxes - len(snapshot.sandboxes))))
        elif lacking < 0:
            actions.extend(_surplus(snapshot, staying, now))
    return actions


def next_due(snapshot: Snapshot, now: float) -> float:
    """The monotonic time at which `plan` may decide something new even if nothing else changes."""
    spec = snapshot.spec
    due = [snapshot.retry_at] if snapshot.retry_at > now else []
    for sandbox in snapshot.sandboxes:
        if sandbox.ready_at is not None:
            due.append(sandbox.ready_at + _lifetime_s(sandbox, spec) + (0.0 if sandbox.state is SandboxState.READY else _lease_s(sandbox, spec)))
        if sandbox.idle_since is not None and sandbox.state is SandboxState.READY:
            due.append(sandbox.idle_since + spec.idle_timeout_s)
        if sandbox.ends_at is not None:
            due.append(sandbox.ends_at - (spec.min_lease_life_s if sandbox.state is SandboxState.READY else 0.0))
    return min((at for at in due if at > now), default=float("inf"))


def backoff_s(failures: int, jitter: Callable[[], float]) -> float:
    """How long to wait after failed creations, in seconds. The pause doubles with each failure up to a limit, and is spread so that pools do not retry at once.

    Args:
        failures: how many creations have failed in a row, at least 1.
        jitter: returns a random number from 0 to 1.
    """
    return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 16)) * (0.75 + 0.5 * jitter()))


def _end_of_life(snapshot: Snapshot, sandbox: SandboxSnapshot, now: float) -> Action | None:
    spec = snapshot.spec
    if sandbox.destroying or sandbox.state in (SandboxState.FAILED, SandboxState.GONE):
        return None
    age_s = 0.0 if sandbox.ready_at is None else now - sandbox.ready_at
    if age_s >= _lifetime_s(sandbox, spec) + _lease_s(sandbox, spec):
        return Retire(sandbox.sandbox_id, "max_lifetime_s and max_lease_s are over", ends_leases=True)
    if sandbox.ends_at is not None and now >= sandbox.ends_at:
        return Retire(sandbox.sandbox_id, "its backend ends it now", ends_leases=True)
    if sandbox.state is SandboxState.DRAINING:
        return Retire(sandbox.sandbox_id, "drained") if sandbox.leased == 0 else None
    if snapshot.closing:
        return Drain(sandbox.sandbox_id, "the pool is going away")
    if sandbox.outdated:
        return Drain(sandbox.sandbox_id, "the pool's spec has changed")
    if sandbox.state is not SandboxState.READY:
        return None
    if age_s >= _lifetime_s(sandbox, spec):
        return Drain(sandbox.sandbox_id, "max_lifetime_s is over")
    if sandbox.ends_at is not None and sandbox.ends_at - now <= spec.min_lease_life_s:
        return Drain(sandbox.sandbox_id, f"its backend ends it within min_lease_life_s of {spec.min_lease_life_s:.10g} s")
    if sandbox.quarantined >= max(1, ceil(spec.slots_per_sandbox * QUARANTINED_PART)):
        return Drain(sandbox.sandbox_id, f"{sandbox.quarantined} of its slots are in quarantine")
    return None


def _lifetime_s(sandbox: SandboxSnapshot, spec: PoolSpec) -> float:
    """A sandbox's agent ends by the value that it was created with. A new spec of the pool can only shorten that."""
    return min(sandbox.max_lifetime_s, spec.max_lifetime_s)


def _lease_s(sandbox: SandboxSnapshot, spec: PoolSpec) -> float:
    return min(sandbox.max_lease_s, spec.max_lease_s)


def _missing_sandbox_count(snapshot: Snapshot, staying: Sequence[SandboxSnapshot]) -> int:
    """How many sandboxes are missing. A negative number: how many there are above the minimum while no acquire waits."""
    spec = snapshot.spec
    wanted = snapshot.slots_wanted + spec.warm_slots
    coming = sum(spec.slots_per_sandbox if s.state is SandboxState.STARTING else s.ready + s.coming for s in staying)
    # A waiter takes over a kept slot before a sandbox is created for it. But a kept slot is not warm.
    coming += min(sum(s.kept for s in staying), snapshot.slots_wanted)
    lacking = max(spec.min_sandboxes - len(staying), ceil((wanted - coming) / spec.slots_per_sandbox))
    if lacking > 0:
        return lacking
    return min(0, spec.min_sandboxes - len(staying)) if not snapshot.slots_wanted else 0


def _surplus(snapshot: Snapshot, staying: Sequence[SandboxSnapshot], now: float) -> list[Action]:
    """Drain idle sandboxes above the minimum, those that are idle longest first, as long as `warm_slots` ready slots are left."""
    spec = snapshot.spec
    idle = [s for s in staying if s.state is SandboxState.READY and s.idle_since is not None and now - s.idle_since >= spec.idle_timeout_s]
    idle.sort(key=lambda s: s.idle_since or 0.0)
    ready = sum(s.ready for s in staying)
    above = len(staying) - spec.min_sandboxes
    actions: list[Action] = []
    for sandbox in idle:
        if above <= 0 or ready - sandbox.ready < spec.warm_slots:
            break
        above -= 1
        ready -= sandbox.ready
        actions.append(Drain(sandbox.sandbox_id, f"idle for idle_timeout_s of {spec.idle_timeout_s:.10g} s"))
    return actions

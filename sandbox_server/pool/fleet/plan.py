"""What a pool should do about its sandboxes, decided from a snapshot alone.

`plan` looks and says; the pool acts, and counts what it has begun before it looks again. So creations under way are in the snapshot as STARTING,
and what is being taken away still counts until the backend says that it is gone: a pool is never larger than `max_sandboxes`.
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
#: What of a spec the pool alone goes by: counts, timeouts, who may use it. Whatever else changes, changes what its sandboxes are made of.
IN_PLACE = frozenset(
    {
        "min_sandboxes", "max_sandboxes", "warm_slots", "idle_timeout_s", "max_lifetime_s", "max_lease_s", "min_lease_life_s", "acquire_timeout_s",
        "default_timeout_s", "max_timeout_s", "on_shutdown", "delete_after_idle_s", "shared",
    }
)  # fmt: skip
_MADE_OF = tuple(field.name for field in fields(PoolSpec) if field.name not in IN_PLACE)


def is_outdated(made_with: PoolSpec, spec: PoolSpec) -> bool:
    """Whether a sandbox made with one spec cannot serve a pool of the other."""
    return any(getattr(made_with, name) != getattr(spec, name) for name in _MADE_OF)


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxSnapshot:
    """What the plan must know of one sandbox. Times are monotonic; `ready_at` and `idle_since` are None where it is neither.

    `coming` counts slots that are being started or reset, `kept` those that a waiter may take over. `destroying`: the backend is at it.
    `outdated`: it was made with another spec than the pool's. `max_lifetime_s` and `max_lease_s` are those it was made with.
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
    destroying: bool = False
    outdated: bool = False
    max_lifetime_s: float = float("inf")
    max_lease_s: float = float("inf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A pool at one moment. `closing`: it is going away and shall have no sandbox. `retry_at`: creating failed, not before then."""

    spec: PoolSpec
    sandboxes: Sequence[SandboxSnapshot] = ()
    slots_wanted: int = 0
    retry_at: float = 0.0
    closing: bool = False


@dataclass(frozen=True, slots=True)
class Create:
    """Make one sandbox."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Give this sandbox no new leases."""

    sandbox_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Retire:
    """Take this sandbox away. It has no leases, unless `ends_leases` says that its time is over whatever runs in it."""

    sandbox_id: str
    why: str
    ends_leases: bool = False


Action = Create | Drain | Retire


def plan(seen: Snapshot, now: float) -> list[Action]:
    """What to do now, in order.

    Args:
        seen: the pool, with everything that is under way.
        now: monotonic seconds.
    """
    actions: list[Action] = []
    drained: set[str] = set()
    for sandbox in seen.sandboxes:
        action = _end_of_life(seen, sandbox, now)
        if action is not None:
            actions.append(action)
            drained.add(sandbox.sandbox_id)
    staying = [s for s in seen.sandboxes if s.sandbox_id not in drained and s.state in (SandboxState.STARTING, SandboxState.READY)]
    too_many = len(staying) - seen.spec.max_sandboxes
    if too_many > 0:
        staying.sort(key=lambda s: (s.leased, s.kept, s.state is SandboxState.READY))
        actions.extend(Drain(s.sandbox_id, f"more than max_sandboxes of {seen.spec.max_sandboxes}") for s in staying[:too_many])
        del staying[:too_many]
    if not seen.closing:
        lacking = _lacking(seen, staying)
        if lacking > 0 and now >= seen.retry_at:
            actions.extend(Create() for _ in range(min(lacking, seen.spec.max_sandboxes - len(seen.sandboxes))))
        elif lacking < 0:
            actions.extend(_surplus(seen, staying, now))
    return actions


def next_due(seen: Snapshot, now: float) -> float:
    """When `plan` may say something new although nothing happens, monotonic."""
    spec = seen.spec
    due = [seen.retry_at] if seen.retry_at > now else []
    for sandbox in seen.sandboxes:
        if sandbox.ready_at is not None:
            due.append(sandbox.ready_at + _lifetime_s(sandbox, spec) + (0.0 if sandbox.state is SandboxState.READY else _lease_s(sandbox, spec)))
        if sandbox.idle_since is not None and sandbox.state is SandboxState.READY:
            due.append(sandbox.idle_since + spec.idle_timeout_s)
    return min((at for at in due if at > now), default=float("inf"))


def backoff_s(failures: int, jitter: Callable[[], float]) -> float:
    """How long to wait after this many failing creates in a row: doubling, bounded, and spread by half so that pools do not retry in step.

    Args:
        failures: at least 1.
        jitter: a random number from 0 to 1.
    """
    return float(min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0 ** min(failures - 1, 16)) * (0.75 + 0.5 * jitter()))


def _end_of_life(seen: Snapshot, sandbox: SandboxSnapshot, now: float) -> Action | None:
    spec = seen.spec
    if sandbox.destroying or sandbox.state in (SandboxState.FAILED, SandboxState.GONE):
        return None
    age_s = 0.0 if sandbox.ready_at is None else now - sandbox.ready_at
    if age_s >= _lifetime_s(sandbox, spec) + _lease_s(sandbox, spec):
        return Retire(sandbox.sandbox_id, "max_lifetime_s and max_lease_s are over", ends_leases=True)
    if sandbox.state is SandboxState.DRAINING:
        return Retire(sandbox.sandbox_id, "drained") if sandbox.leased == 0 else None
    if seen.closing:
        return Drain(sandbox.sandbox_id, "the pool is going away")
    if sandbox.outdated:
        return Drain(sandbox.sandbox_id, "the pool's spec has changed")
    if sandbox.state is not SandboxState.READY:
        return None
    if age_s >= _lifetime_s(sandbox, spec):
        return Drain(sandbox.sandbox_id, "max_lifetime_s is over")
    if sandbox.quarantined >= max(1, ceil(spec.slots_per_sandbox * QUARANTINED_PART)):
        return Drain(sandbox.sandbox_id, f"{sandbox.quarantined} of its slots are in quarantine")
    return None


def _lifetime_s(sandbox: SandboxSnapshot, spec: PoolSpec) -> float:
    """Its agent ends by what it was told when it was made; a pool's new spec can only make that shorter."""
    return min(sandbox.max_lifetime_s, spec.max_lifetime_s)


def _lease_s(sandbox: SandboxSnapshot, spec: PoolSpec) -> float:
    return min(sandbox.max_lease_s, spec.max_lease_s)


def _lacking(seen: Snapshot, staying: Sequence[SandboxSnapshot]) -> int:
    """How many sandboxes there are too few; below zero, how many there are beyond the minimum and nobody waits."""
    spec = seen.spec
    wanted = seen.slots_wanted + spec.warm_slots
    coming = sum(spec.slots_per_sandbox if s.state is SandboxState.STARTING else s.ready + s.coming for s in staying)
    # Kept slots are taken over before a new sandbox is made for a waiter, but they are not warm.
    coming += min(sum(s.kept for s in staying), seen.slots_wanted)
    lacking = max(spec.min_sandboxes - len(staying), ceil((wanted - coming) / spec.slots_per_sandbox))
    if lacking > 0:
        return lacking
    return min(0, spec.min_sandboxes - len(staying)) if not seen.slots_wanted else 0


def _surplus(seen: Snapshot, staying: Sequence[SandboxSnapshot], now: float) -> list[Action]:
    """Idle sandboxes above the minimum, longest idle first, as long as the warm slots stay warm."""
    spec = seen.spec
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

"""One sandbox as its pool knows it, and what of its agent's words the pool believes."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox_server.backends.base import CreateFailed
from sandbox_server.core.clock import Clock, monotonic_at, wall_at
from sandbox_server.core.lifecycle import SandboxEvent, next_sandbox_state
from sandbox_server.core.types import Handle, PoolId, PoolSpec, SandboxState, SlotRef
from sandbox_server.link import AgentLink
from sandbox_server.store.base import CacheRecord, SandboxRecord

_MOST_EVIDENCE = 16
_EVIDENCE_CHARS = 500

MODES = frozenset({"bwrap", "uid", "dedicated", "none"})
#: What a sandbox that is found again has left at least, in seconds.
GRACE_S = 60.0
#: What an agent says of the limits that hold for each slot.
EFFECTIVE = ("slot_memory_mb", "share_memory_mb", "slots_memory_mb", "slot_disk_mb")
SLOT_STATES = frozenset({"starting", "ready", "resetting", "quarantined", "broken"})


@dataclass(slots=True, eq=False)
class Cache:
    """A shared cache in a sandbox. `idle_since`: nobody of its run holds a lease; `dropping`: the agent has been told to delete it."""

    record: CacheRecord
    idle_since: float | None = None
    dropping: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Sandbox:
    """One sandbox. `state` is moved by `happen` alone; times without a clock in their name are monotonic."""

    sandbox_id: str
    pool: str
    spec: PoolSpec
    created_wall: float
    state: SandboxState = SandboxState.STARTING
    handle: Handle | None = None
    link: AgentLink | None = None
    boot: str | None = None
    isolation: str = ""
    ready_at: float | None = None
    idle_since: float | None = None
    destroying: bool = False
    why: str = ""
    caches: dict[str, Cache] = field(default_factory=dict)
    pool_tenant: str | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def happen(self, event: SandboxEvent) -> None:
        """Let something happen to it.

        Raises:
            IllegalTransition: it cannot happen in this state.
        """
        self.state = next_sandbox_state(self.state, event)
        self.wake()

    def wake(self) -> None:
        """Let those look again who wait for something to change."""
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    @property
    def pool_id(self) -> PoolId:
        """Which pool it is of."""
        return PoolId(self.pool, self.pool_tenant)

    @property
    def fields(self) -> dict[str, Any]:
        """What log lines say of it."""
        return {"sandbox_id": self.sandbox_id, **self.pool_id.fields}

    @property
    def reachable(self) -> bool:
        """Whether its agent can be spoken to now."""
        return self.link is not None and not self.link.closed.done()

    def ready_wall(self, clock: Clock) -> float | None:
        """When it first was ready, as the wall clock tells it now."""
        return None if self.ready_at is None else wall_at(clock, self.ready_at)

    def record(self, clock: Clock) -> SandboxRecord:
        """What must be known of it after a crash."""
        return SandboxRecord(
            sandbox_id=self.sandbox_id,
            pool=self.pool,
            state=self.state,
            handle=self.handle,
            created_at=self.created_wall,
            boot=self.boot,
            spec=self.spec,
            ready_at=self.ready_wall(clock),
            caches=tuple(cache.record for cache in self.caches.values()),
            why=self.why,
            pool_tenant=self.pool_tenant,
        )

    @classmethod
    def restored(cls, record: SandboxRecord, spec: PoolSpec, clock: Clock) -> Sandbox:
        """The sandbox of a record. Times of the wall clock become monotonic ones, as far as both can be believed."""
        made_with = record.spec or spec
        # Its agent ends itself by a clock of its own: one that still runs has some time left, whatever the wall clock says.
        oldest_s = max(0.0, made_with.max_lifetime_s + made_with.max_lease_s - GRACE_S)
        return cls(
            sandbox_id=record.sandbox_id,
            pool=record.pool,
            spec=made_with,
            created_wall=record.created_at,
            state=record.state,
            handle=record.handle,
            boot=record.boot,
            ready_at=None if record.ready_at is None else max(monotonic_at(clock, record.ready_at), clock.monotonic() - oldest_s),
            why=record.why,
            pool_tenant=record.pool_tenant,
            caches={cache.key: Cache(cache) for cache in record.caches},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotReport:
    """What an agent said of one slot, checked."""

    ref: SlotRef
    epoch: int
    state: str
    workspace: str
    isolation: str
    detail: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentReport:
    """What an agent said of itself, checked."""

    boot: str
    isolation: str
    capabilities: Mapping[str, Any]
    effective: Mapping[str, int | None]


class AgentProtocolError(Exception):
    """An agent said something that no agent of ours says."""


def read_hello(hello: Mapping[str, Any], sandbox_id: str, spec: PoolSpec) -> AgentReport:
    """Check an agent's hello against what the pool asks for.

    Raises:
        CreateFailed: hopeless, because this machine or image cannot give the pool what its spec asks.
        AgentProtocolError: the hello is not one.
    """
    boot, isolation, capabilities = hello.get("boot"), hello.get("isolation"), hello.get("capabilities") or {}
    if hello.get("sandbox_id") != sandbox_id or not isinstance(boot, str) or not boot or not isinstance(capabilities, dict):
        raise AgentProtocolError("its hello lacks the boot nonce, the capabilities or the right sandbox id")
    if isolation is None:
        raise CreateFailed(f"no isolation mode works here: {str(hello.get('error') or 'the agent gave no reason')[:2000]}", permanent=True)
    if isolation not in MODES:
        raise AgentProtocolError(f"it isolates by {isolation!r}, which is no mode")
    if isolation == "none" and spec.require_sandbox:
        raise CreateFailed("the pool asks for require_sandbox, and no mode of at least 'uid' works here", permanent=True)
    if isolation == "none" and not spec.allow_none:
        raise CreateFailed("only mode 'none' works here, and the pool does not set allow_none", permanent=True)
    if not spec.slots_have_network and "none" not in _strings(capabilities, "network"):
        raise CreateFailed(f"the pool's slots shall have no network, which mode {isolation!r} cannot enforce here", permanent=True)
    missing = {"bash_stateful", "tmux"} - _strings(capabilities, "tools") if spec.require_stateful_sandbox else set()
    if missing:
        raise CreateFailed(f"the pool asks for require_stateful_sandbox, and this agent lacks {', '.join(sorted(missing))}", permanent=True)
    return AgentReport(boot=boot[:200], isolation=isolation, capabilities=capabilities, effective=read_effective(hello) or {})


def read_effective(meta: Mapping[str, Any]) -> Mapping[str, int | None] | None:
    """Check what an agent says of the limits that hold for each of its slots; None: it says nothing of them."""
    said = meta.get("effective")
    if not isinstance(said, dict):
        return None
    return {name: value for name in EFFECTIVE if _is_limit(value := said.get(name))}


def _is_limit(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 1 << 53)


def _strings(capabilities: Mapping[str, Any], name: str) -> set[str]:
    values = capabilities.get(name)
    return {value for value in values if isinstance(value, str)} if isinstance(values, list) else set()


def read_slots(meta: Mapping[str, Any], sandbox_id: str) -> list[SlotReport]:
    """Check what an agent says of its slots.

    Raises:
        AgentProtocolError: it is not what an agent says.
    """
    slots = meta.get("slots")
    if not isinstance(slots, list):
        raise AgentProtocolError("it shows no list of slots")
    return [_read_slot(slot, sandbox_id) for slot in slots]


def _read_slot(slot: Any, sandbox_id: str) -> SlotReport:
    if not isinstance(slot, dict):
        raise AgentProtocolError("it shows a slot that is no object")
    slot_id, epoch, state = slot.get("slot_id"), slot.get("epoch"), slot.get("state")
    if not isinstance(slot_id, str) or not 0 < len(slot_id) <= 64:
        raise AgentProtocolError("it shows a slot without an id")
    if not isinstance(epoch, int) or not 0 <= epoch < 1 << 53 or state not in SLOT_STATES:
        raise AgentProtocolError(f"it shows slot {slot_id!r} in epoch {epoch!r} and state {state!r}")
    workspace, isolation = slot.get("workspace"), slot.get("isolation")
    return SlotReport(
        ref=SlotRef(sandbox_id=sandbox_id, slot_id=slot_id),
        epoch=epoch,
        state=state,
        workspace=workspace if isinstance(workspace, str) else "",
        isolation=isolation if isinstance(isolation, str) and isolation in MODES else "",
        detail=str(slot.get("detail") or "")[:2000],
        evidence=_read_evidence(slot),
    )


def _read_evidence(slot: Mapping[str, Any]) -> Mapping[str, Any]:
    """What its agent says of why a slot is broken: plain values only, and few, because ended leases are kept with it. Older agents say only `own_work`."""
    said = slot.get("evidence")
    if not isinstance(said, dict):
        return {"own_work": True} if slot.get("own_work") is True else {}
    plain = {str(name)[:_EVIDENCE_CHARS]: _plain(value) for name, value in said.items() if isinstance(value, bool | int | float | str)}
    return dict(itertools.islice(plain.items(), _MOST_EVIDENCE))


def _plain(value: float | str) -> float | str:
    if isinstance(value, str):
        return value[:_EVIDENCE_CHARS]
    return value if math.isfinite(value) and abs(value) < 1 << 53 else 0

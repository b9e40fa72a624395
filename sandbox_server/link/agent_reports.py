"""What an agent reports about itself and its slots, checked. Nothing that an agent sends is used before it has been checked here."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sandbox_server.core.types import SlotRef
from sandbox_server.link.call_messages import MAX_EXACT_NUMBER
from sandbox_server.link.errors import AgentProtocolError

ISOLATION_MODES = frozenset({"bwrap", "uid", "dedicated", "none"})
SLOT_STATES = frozenset({"starting", "ready", "resetting", "quarantined", "broken"})
EFFECTIVE_LIMITS = ("slot_memory_mb", "share_memory_mb", "slots_memory_mb", "slot_disk_mb")
"""The limits that an agent reports for its slots."""

_MAX_EVIDENCE_COUNT = 16
_MAX_EVIDENCE_CHARS = 500
_MAX_TEXT_CHARS = 2000
_MAX_LIST_LENGTH = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentReport:
    """What an agent reports about itself when the service connects.

    Args:
        boot: a random value that the agent chose when it started; another value means another agent.
        isolation: the isolation mode that the agent found to work; empty where none works.
        error: why no isolation mode works; empty where one does.
        capabilities: what the agent can do, as it sent it.
        effective: the limits that hold for each slot, in MiB; None for a limit that does not hold.
    """

    boot: str
    isolation: str
    error: str
    capabilities: Mapping[str, Any]
    effective: Mapping[str, int | None]

    def capability_names(self, capability: str) -> frozenset[str]:
        """The names that the agent lists under a capability, such as `network` or `tools`; empty where it lists none."""
        names = self.capabilities.get(capability)
        return frozenset(name for name in names if isinstance(name, str)) if isinstance(names, list) else frozenset()

    def tool_problem(self, tool: str) -> str:
        """Why a tool that the agent has tried does not work; empty if it works, or was not tried."""
        problems = self.capabilities.get("tool_problems")
        return _text(problems.get(tool)) if isinstance(problems, dict) else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotReport:
    """What an agent reports about one slot."""

    ref: SlotRef
    epoch: int
    state: str
    workspace: str
    isolation: str
    detail: str
    evidence: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotsUpdate:
    """One update of an agent about its slots.

    Args:
        slots: the slots that have changed, or all of them in the first update.
        effective: the limits that hold for each slot now, in MiB; None where the update does not mention them.
    """

    slots: tuple[SlotReport, ...]
    effective: Mapping[str, int | None] | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ResetReport:
    """How the reset of a slot ended.

    Args:
        problem: why the slot could not be proven clean; None where it is clean.
    """

    problem: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class PlantedItem:
    """Something that a self-test put into a slot for the reset to find."""

    kind: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """How the self-test of a slot's reset ended. The defaults are those of a slot that was not tested.

    Args:
        planted: what the self-test put into the slot.
        found: the kinds that the reset found.
        left: the kinds that were still there after the reset.
        is_clean: whether the agent says that nothing was left, and the slot is ready.
        problem: why the slot could not be proven clean; None where it is clean.
    """

    planted: tuple[PlantedItem, ...] = ()
    found: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    is_clean: bool = False
    problem: str | None = None


def read_agent_capability(hello: Mapping[str, Any], name: str) -> object:
    """Return a capability of an agent as it sent it in its hello; None where it sent none."""
    capabilities = hello.get("capabilities")
    return capabilities.get(name) if isinstance(capabilities, dict) else None


def read_agent_report(hello: Mapping[str, Any], sandbox_id: str) -> AgentReport:
    """Check the hello of an agent.

    Args:
        hello: the agent's message.
        sandbox_id: the sandbox that the agent must belong to.

    Raises:
        AgentProtocolError: the message is not the hello of this sandbox's agent.
    """
    boot, isolation, capabilities = hello.get("boot"), hello.get("isolation"), hello.get("capabilities") or {}
    if hello.get("sandbox_id") != sandbox_id or not isinstance(boot, str) or not boot or not isinstance(capabilities, dict):
        raise AgentProtocolError("its hello lacks the boot nonce, the capabilities or the right sandbox id")
    if isolation is not None and isolation not in ISOLATION_MODES:
        raise AgentProtocolError(f"its isolation {isolation!r} is no mode of this service")
    error = "" if isolation is not None else str(hello.get("error") or "the agent gave no reason")[:_MAX_TEXT_CHARS]
    effective = _read_effective_limits(hello) or {}
    return AgentReport(boot=boot[:200], isolation=isolation or "", error=error, capabilities=capabilities, effective=effective)


def read_slots_update(meta: Mapping[str, Any], sandbox_id: str) -> SlotsUpdate:
    """Check an update of an agent about its slots.

    Args:
        meta: the agent's message.
        sandbox_id: the sandbox of the agent.

    Raises:
        AgentProtocolError: the message is not such an update.
    """
    slots = meta.get("slots")
    if not isinstance(slots, list):
        raise AgentProtocolError("its update has no list of slots")
    return SlotsUpdate(slots=tuple(_read_slot(slot, sandbox_id) for slot in slots), effective=_read_effective_limits(meta))


def announces_end_of_agent(meta: Mapping[str, Any]) -> bool:
    """Whether an agent says in an update that it shuts down. Older agents do not say it."""
    return meta.get("agent_ends") is True


def read_reset_report(answer: Mapping[str, Any]) -> ResetReport:
    """Read how a reset ended. Anything but the state `ready` means that the slot was not proven clean."""
    is_ready = answer.get("state") == "ready"
    return ResetReport(problem=None if is_ready else str(answer.get("detail") or "its reset was not proven")[:_MAX_TEXT_CHARS])


def read_verify_report(answer: Mapping[str, Any]) -> VerifyReport:
    """Read how the self-test of a reset ended. Parts that have the wrong type are left out."""
    planted = answer.get("planted")
    items = [item for item in planted if isinstance(item, dict)][:_MAX_LIST_LENGTH] if isinstance(planted, list) else []
    left, problem = _texts(answer.get("left")), read_reset_report(answer).problem
    return VerifyReport(
        planted=tuple(PlantedItem(kind=_text(item.get("kind")), detail=_text(item.get("detail"))) for item in items),
        found=_texts(answer.get("found")),
        left=left,
        is_clean=answer.get("clean") is True and problem is None and not left,
        problem=problem,
    )


def _texts(value: object) -> tuple[str, ...]:
    return tuple(_text(item) for item in value[:_MAX_LIST_LENGTH]) if isinstance(value, list) else ()


def _text(value: object) -> str:
    return str(value if value is not None else "")[:_MAX_TEXT_CHARS]


def _read_effective_limits(meta: Mapping[str, Any]) -> Mapping[str, int | None] | None:
    limits = meta.get("effective")
    if not isinstance(limits, dict):
        return None
    return {name: value for name in EFFECTIVE_LIMITS if _is_limit(value := limits.get(name))}


def _is_limit(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < MAX_EXACT_NUMBER)


def _read_slot(slot: Any, sandbox_id: str) -> SlotReport:
    if not isinstance(slot, dict):
        raise AgentProtocolError("its update has a slot that is not an object")
    slot_id, epoch, state = slot.get("slot_id"), slot.get("epoch"), slot.get("state")
    if not isinstance(slot_id, str) or not 0 < len(slot_id) <= 64:
        raise AgentProtocolError("its update has a slot without an id")
    if not isinstance(epoch, int) or not 0 <= epoch < MAX_EXACT_NUMBER or state not in SLOT_STATES:
        raise AgentProtocolError(f"its update has slot {slot_id!r} in epoch {epoch!r} and state {state!r}")
    workspace, isolation = slot.get("workspace"), slot.get("isolation")
    return SlotReport(
        ref=SlotRef(sandbox_id=sandbox_id, slot_id=slot_id),
        epoch=epoch,
        state=state,
        workspace=workspace if isinstance(workspace, str) else "",
        isolation=isolation if isinstance(isolation, str) and isolation in ISOLATION_MODES else "",
        detail=str(slot.get("detail") or "")[:_MAX_TEXT_CHARS],
        evidence=_read_slot_evidence(slot),
    )


def _read_slot_evidence(slot: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read why a slot is broken: a few plain values only, because they are stored with the ended lease. Older agents send only `own_work`."""
    evidence = slot.get("evidence")
    if not isinstance(evidence, dict):
        return {"own_work": True} if slot.get("own_work") is True else {}
    plain = {str(name)[:_MAX_EVIDENCE_CHARS]: _bounded(value) for name, value in evidence.items() if isinstance(value, bool | int | float | str)}
    return dict(itertools.islice(plain.items(), _MAX_EVIDENCE_COUNT))


def _bounded(value: float | str) -> float | str:
    if isinstance(value, str):
        return value[:_MAX_EVIDENCE_CHARS]
    return value if math.isfinite(value) and abs(value) < MAX_EXACT_NUMBER else 0

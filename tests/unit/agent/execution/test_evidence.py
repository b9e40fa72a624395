"""The verdict of a call whose slot has lost its init while all memory for slots is in use."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox_server.agent.execution.evidence import judge_lost_init
from sandbox_server.agent.execution.slot_runtime import LimitEnd, SlotRuntime
from sandbox_server.agent.kernel.memory_plan import MIB, MemoryUsage
from sandbox_server.core.execution import Fault, Reason
from sandbox_server.core.fault import fault_of_result


def make_runtime(usage: MemoryUsage | None, limit_end: LimitEnd | None = None, own_work: bool = False) -> SlotRuntime:
    """A slot without limits of its own, whose memory is `usage` while all memory for slots is in use."""
    groups = SimpleNamespace(limits=None, find_usage_while_full=lambda: usage)
    return cast(SlotRuntime, SimpleNamespace(groups=groups, limit_end=limit_end, link=SimpleNamespace(own_work=own_work)))


def verdict(runtime: SlotRuntime) -> tuple[str, Fault, dict[str, Any]]:
    reason, _, metadata = judge_lost_init(runtime, {}, "init has ended")
    return reason, fault_of_result(Reason(reason), metadata), metadata["evidence"]


@pytest.mark.parametrize(
    ("usage", "fault"),
    [
        (None, Fault.INFRA),
        (MemoryUsage(100 * MIB, 100 * MIB), Fault.INFRA),  # within its share: others have filled the memory
        (MemoryUsage(101 * MIB, 100 * MIB), Fault.AMBIGUOUS),
    ],
)
def test_an_init_that_ends_while_memory_is_full(usage: MemoryUsage | None, fault: Fault) -> None:
    reason, found, evidence = verdict(make_runtime(usage))

    assert (reason, found) == ("sandbox_lost", fault)
    assert evidence.get("used_mb") == (usage.used_bytes // MIB if usage is not None else None)


def test_what_the_agent_has_ended_the_slot_for_decides() -> None:
    end = LimitEnd("oom", "full", {"used_mb": 300}, own_work=True)

    assert verdict(make_runtime(MemoryUsage(101, 100), end))[:2] == ("oom", Fault.POLICY)


def test_a_slot_that_is_proven_to_have_ended_its_init_is_to_blame_while_memory_is_full_too() -> None:
    assert verdict(make_runtime(MemoryUsage(101, 100), own_work=True))[1] is Fault.POLICY

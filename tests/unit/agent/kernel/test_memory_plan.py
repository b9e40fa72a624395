"""How memory is divided: ceilings, shares, and who goes when all of it is used."""

from __future__ import annotations

import pytest

from sandbox_server.agent.kernel.memory_plan import (
    MIB,
    MemoryPlan,
    MemoryUsage,
    fills_group_alone,
    find_furthest_above_share,
    full_threshold_bytes,
    machine_slots_limit_bytes,
)

GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("machine", "limit"),
    [(64 * GIB, int(57.6 * GIB)), (24 * GIB, int(21.6 * GIB)), (8 * GIB, 7 * GIB), (4 * GIB, 3 * GIB), (1 * GIB, 768 * MIB)],
)
def test_the_slots_leave_a_gibibyte_or_a_tenth_of_the_machine(machine: int, limit: int) -> None:
    assert machine_slots_limit_bytes(machine) == pytest.approx(limit, abs=1)


@pytest.mark.parametrize(
    ("plan", "ceiling_mb"),
    [
        (MemoryPlan(24 * GIB, 11), 4096),
        (MemoryPlan(64 * GIB, 2), full_threshold_bytes(machine_slots_limit_bytes(64 * GIB)) // 2 // MIB),  # the share is above 4,096 MiB
        (MemoryPlan(2 * GIB, 10), full_threshold_bytes(1536 * MIB) // MIB),  # nothing is above what fills all that slots have
        (MemoryPlan(24 * GIB, 11, sandbox_bytes=300 * MIB), 285),
        (MemoryPlan(24 * GIB, 11, slot_bytes=9000 * MIB), 9000),
    ],
)
def test_a_ceiling(plan: MemoryPlan, ceiling_mb: int) -> None:
    assert plan.ceiling_bytes // MIB == ceiling_mb


@pytest.mark.parametrize(
    ("plan", "sandbox_hard_mb", "slot_hard_mb"),
    [
        (MemoryPlan(24 * GIB, 2, sandbox_bytes=300 * MIB, slot_bytes=300 * MIB, has_neighbours=False), 1324, 1324),  # the agent ends it at 285 MiB
        (MemoryPlan(4 * GIB, 2, sandbox_bytes=2800 * MIB, slot_bytes=2800 * MIB, has_neighbours=False), 3072, 3072),  # the machine has no more
        (MemoryPlan(24 * GIB, 2, sandbox_bytes=300 * MIB, slot_bytes=200 * MIB, has_neighbours=False), 1324, 200),
        (MemoryPlan(24 * GIB, 2, sandbox_bytes=300 * MIB, has_neighbours=False), 1324, 285),  # its ceiling is the threshold, so the kernel acts there
        (MemoryPlan(24 * GIB, 11, sandbox_bytes=300 * MIB, slot_bytes=300 * MIB), 300, 300),
        (MemoryPlan(4 * GIB, 10), 3072, full_threshold_bytes(3 * GIB) // MIB),
        (MemoryPlan(600 * MIB, 2, slot_bytes=450 * MIB), 450, 450),
    ],
)
def test_where_the_kernel_refuses_memory(plan: MemoryPlan, sandbox_hard_mb: int, slot_hard_mb: int) -> None:
    assert plan.sandbox_hard_limit_bytes // MIB == sandbox_hard_mb
    assert plan.slot_hard_limit_bytes // MIB == slot_hard_mb


@pytest.mark.parametrize("machine", [512 * MIB, 3 * GIB, 24 * GIB, 1024 * GIB])
@pytest.mark.parametrize("sandbox", [None, 200 * MIB])
@pytest.mark.parametrize("others", [0, 1, 7, 500])
def test_all_shares_together_never_fill_a_group(machine: int, sandbox: int | None, others: int) -> None:
    plan = MemoryPlan(machine, 11, sandbox_bytes=sandbox)
    share = plan.share_bytes(plan.slots + others)

    assert share * (plan.slots + others) <= full_threshold_bytes(plan.machine_limit_bytes)
    assert share * plan.slots <= full_threshold_bytes(plan.sandbox_limit_bytes)
    assert share <= plan.ceiling_bytes


def test_a_share_is_no_larger_than_the_slots_own_limit() -> None:
    assert MemoryPlan(24 * GIB, 2, slot_bytes=100 * MIB).share_bytes(2) == 100 * MIB


def test_who_is_furthest_above_its_share_goes_and_not_who_uses_most() -> None:
    usages = [("most", MemoryUsage(900, 880)), ("furthest", MemoryUsage(500, 100)), ("within", MemoryUsage(99, 100))]

    assert find_furthest_above_share(usages) == ("furthest", MemoryUsage(500, 100))


def test_nobody_goes_who_keeps_to_its_share() -> None:
    assert find_furthest_above_share([("a", MemoryUsage(100, 100)), ("b", MemoryUsage(0, 100))]) is None


@pytest.mark.parametrize(
    ("used_mb", "others_mb", "alone"),
    [
        (380, [], True),
        (379, [], False),
        (360, [10, 10], True),  # slots in which nobody works
        (350, [10, 300], False),
        (348, [16, 300], True),  # it would have been full though the other had done nothing
        (200, [100, 100], False),
    ],
)
def test_a_slot_fills_a_group_alone_where_it_would_be_full_though_nobody_else_had_worked(used_mb: int, others_mb: list[int], alone: bool) -> None:
    assert fills_group_alone(used_mb * MIB, [other * MIB for other in others_mb], 400 * MIB) is alone

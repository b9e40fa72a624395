"""A slot that was ended for what it took: who is to blame, and that the calls after its end say the same as the one that it ended under."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integration.attribution.conftest import Open
from tests.integration.attribution.pool_harness import PoolHarness, blame, proof

GROW = """
block, files = b"x" * (1 << 20), []
import os
while True:
    files.append(os.memfd_create("hoard"))
    for _ in range(4):
        os.write(files[-1], block)
"""
BEHIND = "cat > /tmp/grow.py; (setsid python3 /tmp/grow.py > /dev/null 2>&1 < /dev/null &); echo ok"


def grow(harness: PoolHarness, lease: dict[str, Any], command: str) -> dict[str, Any]:
    return harness.call(lease, "bash", {"command": command, "stdin": GROW}, timeout_s=30)


def after_the_end(harness: PoolHarness, lease: dict[str, Any]) -> list[dict[str, Any]]:
    """Two calls after the slot of a lease was ended."""
    found: list[dict[str, Any]] = []

    def ended() -> bool:
        found.append(harness.bash(lease, "true"))  # one that runs just then ends with the slot
        return found[-1]["reason"] == "sandbox_lost"

    harness.until(ended)
    return [found[-1], harness.bash(lease, "true")]


@pytest.mark.privileged
def test_who_fills_its_sandbox_alone_is_to_blame_in_the_calls_after_it_too(open_pool: Open) -> None:
    harness = open_pool(slots_per_sandbox=1, max_sandboxes=1, memory_mb=300, slot_memory_mb=300)
    (lease,) = harness.acquire()
    assert blame(grow(harness, lease, BEHIND)) == ("exit", "none", 0)
    for late in after_the_end(harness, lease):
        assert blame(late) == ("sandbox_lost", "policy", None), late
        assert proof(late)["own_work"] is True
        assert proof(late)["slot_ended"] is True
        assert proof(late)["used_mb"] > 250
        assert proof(late)["group_limit_mb"] == 300
    harness.release_all()

    (lease,) = harness.acquire()
    ended = grow(harness, lease, "exec python3 -")
    assert blame(ended) == ("oom", "policy", None)
    assert proof(ended)["own_work"] is True


@pytest.mark.privileged
def test_where_the_others_use_was_needed_it_is_ambiguous_in_the_calls_after_it_too(open_pool: Open) -> None:
    harness = open_pool(slots_per_sandbox=2, max_sandboxes=1, memory_mb=400, slot_memory_mb=None)
    effective = harness.view()["effective"]
    assert effective["slot_memory_mb"] == 380
    lease, neighbour = harness.acquire(2)
    held = effective["share_memory_mb"] - 30
    assert held > 50
    hold = f"held = bytearray({held} << 20); open('up', 'w').close(); import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)"
    beside = harness.begin_bash(neighbour, f'python3 -c "{hold}"; echo fine')
    harness.until(lambda: harness.bash(neighbour, "test -e up")["success"])
    assert blame(grow(harness, lease, BEHIND)) == ("exit", "none", 0)
    for late in after_the_end(harness, lease):
        assert blame(late) == ("sandbox_lost", "ambiguous", None), late
        assert "own_work" not in proof(late)
        assert proof(late)["used_mb"] > proof(late)["share_mb"]
    harness.bash(neighbour, "touch go")
    (other,) = beside.result()
    assert (blame(other), other["output"]) == (("exit", "none", 0), "fine\n")

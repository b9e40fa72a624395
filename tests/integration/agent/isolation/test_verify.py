"""The verification of resets: planted leftovers are gone, and a reset that omits a step is detected."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sandbox_server.agent.config import SlotLimits
from sandbox_server.agent.slots.verify import start_verification
from sandbox_server.link.errors import AgentRefused
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.agent_parts import IncompleteIsolation, KeepingTrash, open_slot_transitions

EVERYWHERE = {
    "file", "hidden_file", "fifo", "symlink", "closed_folder", "deep_tree", "login_file", "shell_file", "systemd_unit", "tmp_file", "var_tmp_file", "shm_file",
    "posix_shm", "tcp_socket", "abstract_socket", "lock", "sysv_shm", "sysv_sem", "sysv_msg", "process", "detached_process", "deaf_process", "environment",
}  # fmt: skip
IN_BWRAP = {"mqueue"}
REFUSED_IN_BWRAP = {"cron_file", "priority"}  # init is out of a slot's reach
SHARED_WITHOUT_ISOLATION = {
    "host_file", "host_ipc", "posix_shm", "shm_file", "sysv_msg", "sysv_sem", "sysv_shm", "tmp_file", "var_tmp_file",
}  # fmt: skip


async def _verify(harness: AgentHarness, slot: str = "0") -> dict[str, Any]:
    harness.epochs[slot] = harness.epoch(slot) + 1
    return await harness.ask("verify", slot, network=True)


async def test_no_planted_leftover_survives_a_reset(breakable: AgentHarness) -> None:
    report = await _verify(breakable)
    planted = {item["kind"] for item in report["planted"]}

    assert planted >= (EVERYWHERE | IN_BWRAP if breakable.mode == "bwrap" else EVERYWHERE)
    assert report["unseen"] == []
    if breakable.mode == "bwrap":
        assert {item["kind"] for item in report["refused"]} >= REFUSED_IN_BWRAP
    assert all(item["detail"] for item in report["planted"])
    if breakable.mode == "none":
        assert set(report["left"]) - {"mqueue"} == SHARED_WITHOUT_ISOLATION
        assert (report["clean"], report["state"]) == (False, "quarantined")
        return
    assert (report["left"], report["clean"], report["state"]) == ([], True, "ready"), report
    assert set(report["found"]) >= planted
    assert {"host_process", "host_folder"} & set(report["found"])


async def test_a_verified_slot_is_clean_and_belongs_to_its_next_holder(bwrap: AgentHarness) -> None:
    old = bwrap.epoch("0")
    report = await _verify(bwrap)
    seen = await bwrap.bash("ls -A . /tmp /dev/shm; ps -e -o comm= | grep -vc ps")

    assert await bwrap.ask("reset", network=True) == report
    assert "sandbox-verify" not in seen.text
    with pytest.raises(AgentRefused) as refused:
        await bwrap.link.request({"op": "verify", "slot": "0", "epoch": old, "network": True})
    assert refused.value.code == "stale_epoch"


async def test_leftovers_that_a_slot_may_not_plant_are_reported_as_refused() -> None:
    async with open_slot_transitions(limits=SlotLimits(processes=8)) as transitions:
        # Not all that is planted can be found in such a slot, so the first search takes all of this time.
        report = await start_verification(transitions, 2, True, settle_within_s=1.5)

    assert report["clean"], report
    assert "cron_file" in {item["kind"] for item in report["refused"]}


async def test_a_runtime_that_is_not_ended_is_detected() -> None:
    async with open_slot_transitions(lambda real: IncompleteIsolation(real, kills=False)) as transitions:
        # The runtime never ends, so the search after the reset takes all of this time.
        report = await start_verification(transitions, 2, True, settle_within_s=0.5)

    assert not report["clean"]
    assert {"host_process", "host_socket"} <= set(report["left"]), report
    assert report["state"] == transitions.slot.state == "quarantined"
    assert "host_process" in report["detail"]


async def test_folders_that_are_not_replaced_are_detected() -> None:
    async with open_slot_transitions(lambda real: IncompleteIsolation(real, renews_folders=False), KeepingTrash) as transitions:
        report = await start_verification(transitions, 2, True)

    assert {"file", "hidden_file", "closed_folder", "deep_tree", "systemd_unit", "tmp_file", "host_folder"} <= set(report["left"]), report
    assert "process" in report["found"]
    assert report["state"] == "quarantined"


async def test_folders_that_are_not_deleted_are_detected() -> None:
    async with open_slot_transitions(trash_type=KeepingTrash) as transitions:
        report = await start_verification(transitions, 2, True)

    assert report["left"] == ["host_folder"], report
    assert report["state"] == "quarantined"


async def test_an_unchanged_agent_leaves_nothing() -> None:
    async with open_slot_transitions() as transitions:
        report = await start_verification(transitions, 2, True)

    assert (report["left"], report["state"]) == ([], "ready"), report
    if os.geteuid() == 0:
        assert "host_namespace" in report["found"]

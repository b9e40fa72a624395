"""A start of a slot that fails leaves nothing behind, so that a slot may fail to start any number of times."""

from __future__ import annotations

import os

import pytest

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import ReadOnlyEntry
from sandbox_server.agent.isolation.bwrap import BwrapIsolation
from tests.integration.agent.agent_parts import open_slot_transitions


async def test_a_failed_start_leaves_no_folder_user_or_group() -> None:
    async with open_slot_transitions() as transitions:
        isolation = transitions.runtimes.isolation
        assert isinstance(isolation, BwrapIsolation)
        slots = os.path.dirname(transitions.slot.current_runtime().dirs.root)
        before = os.listdir(slots), len(os.listdir("/proc/self/fd")), set(isolation._folders._states)
        missing = ReadOnlyEntry("missing", 1, 1)
        for _ in range(2):
            with pytest.raises(StartFailed, match="missing could not be mounted"):
                await isolation.start_runtime("1", True, None, None, [missing])

        assert (os.listdir(slots), len(os.listdir("/proc/self/fd")), set(isolation._folders._states)) == before
        assert (await transitions.start_reset(transitions.slot.epoch + 1, True, False))["state"] == "ready"

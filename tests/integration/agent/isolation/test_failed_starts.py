"""A start of a slot that fails leaves nothing behind, so that a slot may fail to start any number of times."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import ReadOnlyEntry
from sandbox_server.agent.isolation import bwrap_template
from sandbox_server.agent.isolation.base import interpreter
from sandbox_server.agent.isolation.bwrap import BwrapIsolation
from sandbox_server.agent.isolation.forking.slot_template import MAX_FIRST_TRIES
from sandbox_server.agent.isolation.forking.template_process import TemplateProcess, start_template
from sandbox_server.agent.isolation.starter import library_environment
from tests.integration.agent.agent_parts import open_slot_transitions
from tests.support.users import ROOT
from tests.unit.agent.open_files import only_so_many_new_files


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


@pytest.mark.parametrize(("failure_count", "is_forked"), [(1, True), (MAX_FIRST_TRIES, False)])
async def test_a_template_that_fails_for_lack_of_something_is_tried_again(monkeypatch: pytest.MonkeyPatch, failure_count: int, is_forked: bool) -> None:
    tries = itertools.count(1)

    async def start_later(*args: Any) -> TemplateProcess:
        if next(tries) <= failure_count:
            raise StartFailed("no process is left", temporary=True)
        return await start_template(*args)

    monkeypatch.setattr(bwrap_template, "start_template", start_later)
    async with open_slot_transitions() as transitions:
        assert transitions.runtimes.isolation.slot_start == "executed: no process is left"
        for _ in range(MAX_FIRST_TRIES):
            assert (await transitions.start_reset(transitions.slot.epoch + 1, True, False))["state"] == "ready"

        assert transitions.runtimes.isolation.slot_start == ("forked" if is_forked else "executed: no process is left")


@pytest.mark.privileged
async def test_a_template_that_finds_no_free_descriptor_can_be_started_later() -> None:
    before = os.listdir("/proc/self/fd")
    for file_count in range(40):
        try:
            with only_so_many_new_files(file_count):
                template = await start_template(interpreter(), str(ROOT), {"unmounts": (), "capabilities": 0, "filters": ()}, library_environment())
        except StartFailed as error:
            is_temporary = error.temporary
        else:
            template.close_template()
            break
        assert is_temporary
        assert os.listdir("/proc/self/fd") == before

    assert file_count > 4
    assert os.listdir("/proc/self/fd") == before

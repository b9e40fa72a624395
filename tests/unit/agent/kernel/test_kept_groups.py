"""The control groups of ended slot runtimes that are used again, in the hierarchies of this machine."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator

import pytest

from sandbox_server.agent.config import AgentConfig, Listen
from sandbox_server.agent.kernel.cgroups import Cgroups, SlotGroups
from tests.unit.agent.open_files import only_so_many_new_files

pytestmark = pytest.mark.privileged


@pytest.fixture
def cgroups() -> Iterator[Cgroups]:
    groups = Cgroups(secrets.token_hex(8), AgentConfig(sandbox_id="s", token="t", listen=Listen(""), base_dir="/nowhere"))
    yield groups
    groups.remove_agent_groups()


def _make_unused_groups(cgroups: Cgroups, name: str) -> SlotGroups:
    groups = cgroups.make_groups(name)
    groups.close_join_fds()
    return groups


def _leaf_paths(groups: SlotGroups) -> list[str]:
    if groups.leaves is None:
        pytest.skip("this machine has no cgroup v2")
    return groups.leaves.paths()


def test_a_runtime_that_is_ended_twice_leaves_its_groups_to_one_other(cgroups: Cgroups) -> None:
    ended = _make_unused_groups(cgroups, "1")
    paths = _leaf_paths(ended)
    for _ in range(2):
        cgroups.keep_or_remove_groups(ended, may_keep=True)
    second, third = _make_unused_groups(cgroups, "2"), _make_unused_groups(cgroups, "3")
    cgroups.keep_or_remove_groups(ended, may_keep=False)
    ended.remove_groups()

    assert _leaf_paths(second) == paths
    assert not set(_leaf_paths(third)) & set(paths)
    assert all(map(os.path.exists, paths))
    for groups in (second, third):
        groups.remove_groups()


def test_a_runtime_whose_groups_were_removed_can_be_ended_again(cgroups: Cgroups) -> None:
    ended = _make_unused_groups(cgroups, "1")
    paths = _leaf_paths(ended)
    for _ in range(2):
        cgroups.keep_or_remove_groups(ended, may_keep=False)
        ended.remove_groups()

    assert not any(map(os.path.exists, paths))
    _make_unused_groups(cgroups, "1").remove_groups()


@pytest.mark.parametrize("are_kept", [False, True], ids=["new", "kept"])
def test_nothing_is_left_of_groups_whose_files_cannot_be_opened(cgroups: Cgroups, are_kept: bool) -> None:
    _leaf_paths(first := _make_unused_groups(cgroups, "first"))
    folders = _list_slot_groups(cgroups)
    first.remove_groups()
    before = len(os.listdir("/proc/self/fd")), _list_slot_groups(cgroups)
    refused_count = 0
    for file_count in range(40):
        if are_kept:
            cgroups.keep_or_remove_groups(_make_unused_groups(cgroups, str(file_count)), may_keep=True)
        groups = _make_groups_with(cgroups, file_count)
        if groups is not None:
            groups.close_join_fds()
            groups.remove_groups()
            break
        refused_count += 1
        assert (len(os.listdir("/proc/self/fd")), _list_slot_groups(cgroups)) == before

    assert refused_count >= 2
    assert before[1] < folders
    assert (len(os.listdir("/proc/self/fd")), _list_slot_groups(cgroups)) == before


def _make_groups_with(cgroups: Cgroups, file_count: int) -> SlotGroups | None:
    try:
        with only_so_many_new_files(file_count):
            return cgroups.make_groups("last")
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        return None


def _list_slot_groups(cgroups: Cgroups) -> set[str]:
    tops = {*cgroups._tops.values(), *cgroups._limit_tops.values()}
    return {path for top in tops for path, _, _ in os.walk(top) if path != top}

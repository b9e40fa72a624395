"""Entries of a workspace that become read-only: by the agent, in each mode that has it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sandbox_server.link.errors import AgentRefused
from tests.integration.agent.agent_harness import AgentHarness, AgentProcess, agent_process
from tests.integration.agent.conftest import ROOT, USER, SharedAgents, clean_harness
from tests.support.users import ME

CAN = [mode for mode in (*ROOT, *USER) if mode[0] != "none"] if os.geteuid() == 0 else [("bwrap", "user")]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A folder for workspaces that private mounts do not hide."""
    folder = tempfile.mkdtemp(prefix="read-only-", dir="/opt" if os.geteuid() == 0 else None)
    os.chmod(folder, 0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=CAN, ids="-".join)
def agent(request: pytest.FixtureRequest, shared_agents: SharedAgents, base: str) -> Iterator[AgentProcess]:
    """An agent in each mode that has read-only entries."""
    mode, user = request.param
    if mode == "uid":
        with agent_process(ME, mode, workspace_base=base, slots=1) as own:
            yield own
    else:
        yield shared_agents.get_agent(mode, user)


@pytest.fixture
async def harness(agent: AgentProcess) -> AsyncIterator[AgentHarness]:
    """A link to that agent."""
    async with clean_harness(agent) as harness:
        places = harness.link.hello["capabilities"]["places"]
        if places != "own":
            pytest.skip(f"root may make no namespaces here: {places}")
        yield harness


async def _refusal(harness: AgentHarness, **fields: object) -> AgentRefused:
    with pytest.raises(AgentRefused) as refused:
        await harness.ask("narrow", **{"cache": None, "network": True, **fields})
    return refused.value


async def _running_sleeps(harness: AgentHarness) -> int:
    """How many processes of the slot are programs named sleep. A zombie is not counted: it has ended, and waits for a parent outside of the slot."""
    return int((await harness.bash("ps -o stat=,comm= -u $(id -u) | grep -c '^[^Z].* sleep$'; true")).text)


async def test_only_a_new_entry_ends_processes_and_all_stay_until_the_reset(harness: AgentHarness) -> None:
    assert harness.link.hello["capabilities"]["read_only"] is True
    await harness.bash("mkdir tests; echo kept > tests/a; echo x > file; sleep 7102 >/dev/null 2>&1 &")

    first = await harness.ask("narrow", cache=None, network=True, read_only=["tests"])
    assert (first, await _running_sleeps(harness)) == ({"read_only": ["tests"]}, 0)
    await harness.bash("sleep 7102 >/dev/null 2>&1 & until [ $(cat /proc/$!/comm) = sleep ]; do :; done")
    again = await harness.ask("narrow", cache=None, network=True, read_only=["tests"])
    nothing = await harness.ask("narrow", cache=None, network=True)
    assert (again, nothing, await _running_sleeps(harness)) == (first, first, 1), "a repeated request ends nothing"
    more = await harness.ask("narrow", cache=None, network=True, read_only=["file"])

    assert more == {"read_only": ["tests", "file"]}
    tried = await harness.bash('echo x >> tests/a || rm tests/a || mv tests t || mv file f || cat tests/a file; python3 -c \'open("tests/new", "w")\'')
    assert tried.text.splitlines()[4:6] == ["kept", "x"], tried.text
    assert tried.code == 1
    assert (await harness.reset(keep=True))["state"] == "ready"
    assert (await harness.bash("echo y >> tests/a && rm file && mv tests t && cat t/a")).text == "kept\ny\n", "the next lease can change what was kept"
    assert (await harness.reset())["state"] == "ready"
    assert (await harness.bash("ls -A; grep -c ' ro,.*tests' /proc/self/mountinfo")).text == "0\n"


async def test_what_is_refused_keeps_all_rights_and_a_wrong_name_all_processes(harness: AgentHarness) -> None:
    await harness.bash("mkdir -p deep/$(printf 'x/%.0s' {1..101}); sleep 7103 >/dev/null 2>&1 & until [ $(cat /proc/$!/comm) = sleep ]; do :; done")
    can_be_offline = "none" in harness.link.hello["capabilities"]["network"]

    missing = await _refusal(harness, read_only=["nope"], network=not can_be_offline)
    path = await _refusal(harness, read_only=["../tmp"])
    assert (missing.code, path.code, await _running_sleeps(harness)) == ("file_not_found", "invalid", 1)
    deep = await _refusal(harness, read_only=["deep"], network=not can_be_offline)
    assert (deep.code, await _running_sleeps(harness)) == ("file_error", 0), "this is only known when nothing of the slot runs"

    assert (await harness.bash("touch deep/y && ls deep")).text == "x\ny\n"
    if can_be_offline:
        assert int((await harness.bash("grep -c : /proc/net/dev")).text) > 1, "the network was not taken either"


async def test_an_entry_that_was_replaced_from_outside_ends_the_slot_instead_of_serving_it(harness: AgentHarness, base: str) -> None:
    await harness.bash("mkdir tests other")
    await harness.ask("narrow", cache=None, network=True, read_only=["tests"])
    # `os.walk` passes over folders that vanish meanwhile, such as those of an earlier slot in the trash.
    walked = [step for top in (harness.folder, base) for step in os.walk(top)]
    (workspace,) = [Path(folder) for folder, folders, _ in walked if os.path.basename(folder) == "workspace" and "tests" in folders]
    (workspace / "tests").rename(workspace / "moved")
    (workspace / "tests").mkdir()

    refused = await _refusal(harness, read_only=["other"])

    assert "'tests' of the workspace was replaced" in refused.detail
    assert (await harness.reset())["state"] == "ready"


@pytest.mark.parametrize("mode", [("uid", "root"), ("none", "user")] if os.geteuid() == 0 else [("none", "user")], ids="-".join)
async def test_modes_without_mounts_of_their_own_refuse(shared_agents: SharedAgents, mode: tuple[str, str]) -> None:
    async with clean_harness(shared_agents.get_agent(*mode)) as harness:
        await harness.bash("mkdir tests")

        refused = await _refusal(harness, read_only=["tests"])

        assert harness.link.hello["capabilities"]["read_only"] is False
        assert refused.code == "not_implemented"
        assert (await harness.bash("touch tests/a && ls tests")).text == "a\n"

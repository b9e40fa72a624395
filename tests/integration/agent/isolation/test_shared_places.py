"""Slots as users of their own: `/tmp`, `/dev/shm` and IPC are each slot's own where that can be, and swept by owner where not."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.agent.agent_harness import AgentHarness, AgentProcess, agent_process
from tests.integration.agent.conftest import Maker, SharedAgents, clean_harness
from tests.support.users import ME

pytestmark = pytest.mark.privileged


async def _shared(make_harness: Maker) -> AgentHarness:
    """Slots that share the machine's places: their workspaces lie in one, so that it cannot be hidden from them."""
    harness = await make_harness("uid", "root")
    assert harness.link.hello["capabilities"]["places"].startswith("shared: workspace_base lies in /tmp")
    return harness


@pytest.fixture
async def shared(shared_agents: SharedAgents) -> AsyncIterator[AgentHarness]:
    """A link to the shared agent of the mode `uid`, whose slots share the machine's places."""
    async with clean_harness(shared_agents.get_agent("uid", "root")) as harness:
        assert harness.link.hello["capabilities"]["places"].startswith("shared: workspace_base lies in /tmp")
        yield harness


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A folder for workspaces that is in no shared place."""
    folder = tempfile.mkdtemp(prefix="own-places-", dir="/opt")
    os.chmod(folder, 0o711)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def own_agent(base: str) -> Iterator[AgentProcess]:
    """An agent whose slots have places of their own, for all tests of this file."""
    with agent_process(ME, "uid", workspace_base=base) as agent:
        yield agent


@pytest.fixture
async def own(own_agent: AgentProcess) -> AsyncIterator[AgentHarness]:
    """A link to that agent."""
    async with clean_harness(own_agent) as harness:
        if harness.link.hello["capabilities"]["places"] != "own":
            pytest.skip(f"root may make no namespaces here: {harness.link.hello['capabilities']['places']}")
        yield harness


async def test_a_slot_with_its_own_shared_folders_does_not_see_those_of_the_machine(own: AgentHarness) -> None:
    harness = own
    name = secrets.token_hex(8)
    Path("/tmp", name).touch()
    left = await harness.bash(
        f"ls -A /tmp /var/tmp; touch /tmp/{name}-mine /dev/shm/{name} /run/lock/{name}; ls /var/tmp; ipcmk -M 4096 >/dev/null; ipcs -m | wc -l"
    )
    other = await harness.bash("ls -A /tmp /var/tmp /dev/shm /run/lock; ipcs -m | wc -l", "1")
    outside = [place for place in ("/tmp", "/dev/shm", "/run/lock") if any(name in found and found != name for found in os.listdir(place))]
    Path("/tmp", name).unlink()

    assert f"{name}-mine" in left.text
    assert name not in other.text
    assert outside == []
    assert (await harness.bash("pwd; echo ${TMPDIR-none}; df /tmp >/dev/null")).text.endswith("\nnone\n")
    written = await harness.call("write_file", args={"path": "/tmp/by-tool", "content": "x"})
    assert written.reason == "exit", written.error
    assert (await harness.bash("cat /tmp/by-tool")).text == "x"
    assert (await harness.reset())["state"] == "ready"
    assert (await harness.bash("ls -A /tmp /dev/shm /run/lock | grep -v : ; ipcs -m | grep -c 0x")).text.split() == ["0"]


async def test_what_the_machine_mounts_and_a_slot_hides_is_the_slots_alone(own: AgentHarness) -> None:
    harness = own
    before = Path("/proc/self/mountinfo").read_text()
    mounts = await harness.bash("cat /proc/self/mountinfo")

    assert " /tmp " in mounts.text
    assert Path("/proc/self/mountinfo").read_text() == before


async def test_a_symbolic_link_in_place_of_a_shared_folder_is_not_followed(base: str, own: AgentHarness) -> None:
    harness = own
    Path(base, "closed").mkdir(mode=0o700)
    Path(base, "closed", "open").mkdir()
    Path(base, "closed", "open", "secret").write_text("secret")
    await harness.bash(f"cd .. && mv tmp gone && ln -s {base}/closed/open tmp")
    done = await harness.reset(keep=True)

    assert done["state"] != "ready" or "secret" not in (await harness.bash("ls /tmp")).text
    assert (await harness.reset())["state"] == "ready"


DEEP = """
import os
os.mkdir("/tmp/{name}"); os.chmod("/tmp/{name}", 0o777); os.chdir("/tmp/{name}")
for _ in range(6000):
    os.mkdir("d"); os.chmod("d", 0o777); os.chdir("d")
"""


async def test_a_very_deep_tree_does_not_cause_quarantine(shared: AgentHarness) -> None:
    harness = shared
    name = f"deep-{secrets.token_hex(8)}"
    dug = await harness.bash("/usr/bin/python3 -I -", stdin=DEEP.format(name=name), timeout_s=60)
    assert dug.code == 0, dug.text

    assert (await harness.reset("1"))["state"] == "ready"
    assert Path("/tmp", name).is_dir()
    done = await harness.reset("0")
    assert (done["state"], done["proof"]["leftovers_removed"]) == ("ready", 1), done
    assert not Path("/tmp", name).exists()


async def test_files_in_a_folder_of_another_slot_are_removed_without_quarantine(shared: AgentHarness) -> None:
    harness = shared
    name = f"open-{secrets.token_hex(8)}"
    await harness.bash(f"mkdir -p /tmp/{name}/below/more; chmod 777 /tmp/{name}/below; chmod 755 /tmp/{name}")
    await harness.bash(f"echo mine > /tmp/{name}/below/left; mkdir /tmp/{name}/below/own; echo mine > /tmp/{name}/below/own/left", "1")

    assert (await harness.reset("1"))["state"] == "ready"
    assert (await harness.bash(f"ls -A /tmp/{name}/below")).text == "more\n"
    await harness.bash(f"echo mine > /tmp/{name}/below/left; chmod 600 /tmp/{name}/below/left", "1")
    assert (await harness.reset("0"))["state"] == "ready"
    assert not Path("/tmp", name).exists()
    assert (await harness.reset("1"))["state"] == "ready"


async def test_files_of_a_killed_agent_are_removed_before_its_user_ids_are_used_again(make_harness: Maker) -> None:
    harness = await _shared(make_harness)
    name = f"left-{secrets.token_hex(8)}"
    segment = "python3 -c 'import ctypes; print(ctypes.CDLL(None).shmget(0x5ea2, 4096, 0o1600))'"
    await harness.bash(
        f"umask 077; echo secret > /tmp/{name}; mkdir -p /dev/shm/{name}/d; touch /dev/shm/{name}/d/f; {segment}; nohup setsid sleep 7057 & true"
    )
    uid = Path("/tmp", name).stat().st_uid
    inits = harness.inits()
    for init in inits:
        init.suspend()  # so that it does not see that the agent has gone
    harness.process.send_signal(signal.SIGKILL)
    await asyncio.get_running_loop().run_in_executor(None, harness.process.wait)

    others = [await _shared(make_harness) for _ in range(2)]  # ranges are taken in order, so one of them has it unless somebody else took it before
    living = [process.pid for process in psutil.process_iter(["uids", "status"]) if process.info["uids"].real == uid and process.info["status"] != "zombie"]
    for init in inits:
        init.kill()
    uids = [int((await other.bash("id -u")).text) for other in others]
    if not any(start <= uid < start + 1024 for start in _starts(uids)):
        pytest.skip("another agent on this machine has the user ids now")
    assert living == []
    assert not Path("/tmp", name).exists()
    assert not Path("/dev/shm", name).exists()
    assert (await others[0].bash("awk '$1 == 24226' /proc/sysvipc/shm")).text == ""


def _starts(uids: list[int]) -> list[int]:
    return [uid - (uid - 1_000_000) % 1024 for uid in uids]


async def test_a_message_queue_cannot_be_created_where_the_agent_could_not_find_it(shared: AgentHarness) -> None:
    script = "import ctypes, os; l = ctypes.CDLL('librt.so.1'); print(l.mq_open(b'/q', os.O_CREAT | os.O_RDWR, 0o600, None))"
    answer = await shared.bash("/usr/bin/python3 -I -", stdin=script)

    assert answer.text == "-1\n" or os.path.ismount("/dev/mqueue")

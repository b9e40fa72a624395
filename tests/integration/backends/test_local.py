"""The local backend with a stand-in for the agent: what it leaves at each checkpoint, and that `destroy` takes all of it away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tempfile
from contextlib import aclosing, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.agent import build
from sandbox_server.agent.build import content
from sandbox_server.backends import local
from sandbox_server.backends.base import CreateContext, CreateFailed, ObservedState
from sandbox_server.backends.certificate import make_certificate
from sandbox_server.backends.group import group_parents
from sandbox_server.backends.local import GROUP_PREFIX, LocalBackend, make_local_backend
from sandbox_server.backends.processes import end_process, is_running, spawn, start_time
from sandbox_server.backends.registry import BUILT, NOT_BUILT, load_backend
from sandbox_server.core.errors import InvalidRequest, NotImplementedHere
from sandbox_server.core.types import Handle, LocalSpec, PoolId, PoolSpec

LISTENS = """
import json, socket, sys, signal, subprocess
config = json.loads(sys.stdin.read())
open(config["listen"]["unix"] + ".config", "w").write(json.dumps(config))
listener = socket.socket(socket.AF_UNIX)
listener.bind(config["listen"]["unix"])
listener.listen()
signal.pause()
"""
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + LISTENS.replace("signal.pause()", "while True: signal.pause()")
DIES = "import sys\nsys.stderr.write('no bubblewrap in this place')\nsys.exit(3)\n"
BREEDS = LISTENS.replace("signal.pause()", "child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\nprint(child.pid, flush=True)\nsignal.pause()")


# The groups of sandboxes lie side by side on this machine: another run of these tests has other names.
ONE, TWO = (f"s-{os.getpid()}-{number}" for number in (1, 2))


@pytest.fixture
def make_backend(tmp_path):
    # A short path, whatever the run's own folder is called: sockets lie in it.
    folder = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))

    def make(source=LISTENS, **options):
        agent = tmp_path / "agent.py"
        agent.write_text(source)
        return LocalBackend(folder / "sandboxes", "me", lambda: agent, **options)

    yield make
    # On a loaded machine, the process with which a backend deletes folders may still be at work: `rm` accepts that, and shutil.rmtree does not.
    subprocess.run(["rm", "-rf", folder], check=True)


async def create(backend, sandbox_id=ONE, steps=99, **spec):
    """Create, stopping after so many checkpoints. Returns the last handle."""
    last = None
    async with aclosing(backend.create(CreateContext(pool_id=PoolId("p"), spec=PoolSpec(**spec), sandbox_id=sandbox_id))) as checkpoints:
        async for handle in checkpoints:
            last = handle
            steps -= 1
            if not steps:
                break
    return last


def is_clean(backend):
    return not any(backend._folder.iterdir())


async def test_create_gives_an_address_and_tells_the_agent_everything_by_stdin(make_backend):
    backend = make_backend()
    handle = await create(backend, slots_per_sandbox=3, slot_processes=7, memory_mb=64, env_vars={"A": "b"}, allow_network=False)

    assert handle.address == f"unix:{backend._folder}/{ONE}/agent.sock"
    config = json.loads((backend._folder / ONE / "agent.sock.config").read_text())
    assert (config["slots"], config["network"], config["env_vars"], config["sandbox_id"]) == (3, False, {"A": "b"}, ONE)
    assert config["limits"] == {"processes": 7, "memory_mb": None, "disk_mb": None, "max_file_mb": 1024, "cpu": None}
    assert config["memory_mb"] == 64
    assert config["token"] == handle.token
    seen = Path(f"/proc/{handle.data['pid']}/cmdline").read_bytes() + Path(f"/proc/{handle.data['pid']}/environ").read_bytes()
    assert handle.token.encode() not in seen
    assert os.getsid(handle.data["pid"]) == handle.data["pid"]
    await backend.destroy(handle)


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
async def test_whatever_was_yielded_last_is_destroyed_whole(make_backend, steps):
    backend = make_backend()
    handle = await create(backend, steps=steps)
    assert [known.sandbox_id for known in await backend.list_owned("me")] == [ONE]
    assert await backend.list_owned("somebody else") == []

    await backend.destroy(handle)
    await backend.destroy(handle)

    assert is_clean(backend)
    assert await backend.list_owned("me") == []
    assert "pid" not in handle.data or not is_running(handle.data["pid"], handle.data["started"])
    assert "group" not in handle.data or not os.path.exists(handle.data["group"])


async def test_what_a_killed_agent_left_in_the_workspace_base_goes_too(make_backend, tmp_path):
    backend = make_backend()
    handle = await create(backend, workspace_base=str(tmp_path / "data"))
    deep = tmp_path / "data" / ONE / "0" / "workspace" / "a" / "b"
    deep.mkdir(parents=True)
    deep.chmod(0)
    other = tmp_path / "data" / TWO
    other.mkdir()

    await backend.destroy(handle)

    assert [path.name for path in (tmp_path / "data").iterdir()] == [TWO]


async def test_an_older_handle_destroys_what_came_after_it(make_backend):
    backend = make_backend()
    whole = await create(backend)

    await backend.destroy(replace(whole, data={}, address=None))

    assert is_clean(backend)
    assert not is_running(whole.data["pid"], whole.data["started"])


async def test_an_agent_that_ignores_sigterm_is_killed(make_backend):
    backend = make_backend(STUBBORN, term_s=0.05)
    handle = await create(backend)

    await backend.destroy(handle)

    assert not is_running(handle.data["pid"], handle.data["started"])


async def test_what_a_dead_agent_left_running_dies_with_the_group(make_backend):
    backend = make_backend(BREEDS)
    handle = await create(backend)
    if "group" not in handle.data:
        await backend.destroy(handle)
        pytest.skip("no cgroup v2 that can be written here")
    log = backend._folder / ONE / "agent.log"
    while not log.read_text().endswith("\n"):
        await asyncio.sleep(0)
    child = int(log.read_text())
    os.kill(handle.data["pid"], signal.SIGKILL)

    await backend.destroy(handle)

    assert start_time(child) is None
    assert not os.path.exists(handle.data["group"])


async def test_groups_that_a_killed_agent_made_for_itself_go_too(make_backend):
    backend = make_backend()
    handle = await create(backend)
    name = f"{GROUP_PREFIX}{handle.data['pid']}-0123abcd"
    made = []
    for parent in group_parents():
        with suppress(OSError):
            (parent / name / "slot").mkdir(parents=True)
            made.append(parent / name)
    os.kill(handle.data["pid"], signal.SIGKILL)

    await backend.destroy(handle)

    assert [group for group in made if group.exists()] == []


async def states(backend, *handles):
    """The observed states, by sandbox id."""
    return {sandbox_id: observation.state for sandbox_id, observation in (await backend.observe(handles)).items()}


async def test_observe_tells_running_sandboxes_from_those_that_are_gone(make_backend):
    backend = make_backend()
    one, two = await create(backend, ONE), await create(backend, TWO)
    await backend.destroy(one)

    assert await states(backend, one, two) == {ONE: ObservedState.GONE, TWO: ObservedState.RUNNING}
    recycled = replace(two, data={**two.data, "started": two.data["started"] - 1})
    assert (await states(backend, recycled))[TWO] is ObservedState.GONE
    await backend.destroy(two)


async def test_an_agent_that_ends_at_once_says_why(make_backend):
    backend = make_backend(DIES)

    with pytest.raises(CreateFailed, match="no bubblewrap in this place"):
        await create(backend)

    (handle,) = await backend.list_owned("me")
    await backend.destroy(handle)
    assert is_clean(backend)


async def test_a_folder_without_a_record_is_an_orphan_too(make_backend):
    backend = make_backend()
    (backend._folder / "s-lost" / "base").mkdir(parents=True)

    (handle,) = await backend.list_owned("me")
    await backend.destroy(handle)

    assert is_clean(backend)


async def test_in_a_deep_state_folder_the_socket_is_elsewhere_and_goes_too(tmp_path):
    agent = tmp_path / "agent.py"
    agent.write_text(LISTENS)
    backend = LocalBackend(tmp_path / ("deep" * 30), "me", lambda: agent)
    handle = await create(backend)
    assert len(handle.address) < 108

    await backend.destroy(handle)

    assert not os.path.exists(handle.data["socket_dir"])


async def test_where_temporary_files_lie_deep_too_the_socket_still_has_a_short_path(tmp_path, monkeypatch):
    agent = tmp_path / "agent.py"
    agent.write_text(LISTENS)
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    backend = LocalBackend(deep / "state", "me", lambda: agent)

    handle = await create(backend)
    await backend.destroy(handle)

    assert len(handle.address) < 108
    assert not os.path.exists(handle.data["socket_dir"])


async def test_where_no_path_is_short_enough_that_is_said_at_once(tmp_path, monkeypatch):
    deep = tmp_path / ("deep" * 30)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(local, "SHORT_FOLDERS", ("/proc", "/does/not/exist"))
    backend = LocalBackend(deep / "state", "me", lambda: tmp_path)

    with pytest.raises(CreateFailed, match="at most 100 bytes") as caught:
        await create(backend)

    assert caught.value.permanent
    await backend.destroy(Handle(backend="local", pool="p", owner="me", sandbox_id=ONE))
    assert os.listdir(deep / "state") in ([], ["sandboxes"])


async def test_a_dedicated_sandbox_is_refused_for_good(make_backend):
    with pytest.raises(CreateFailed) as caught:
        await create(make_backend(), dedicated=True)
    assert caught.value.permanent


@pytest.mark.parametrize(("path", "why"), [("/nonexistent", "'/nonexistent' is not there"), ("etc", "'etc' is no absolute path")])
async def test_what_is_exposed_must_be_there(make_backend, path, why):
    with pytest.raises(CreateFailed, match=why) as caught:
        await create(make_backend(), local=LocalSpec(expose=("/usr", path)))
    assert caught.value.permanent


async def test_a_recycled_pid_is_not_ended():
    read, write = os.pipe()
    pid, started = spawn(["/bin/sleep", "1000"], {}, read, write)
    await end_process(pid, started + 1, 0.1, 0.1)
    assert is_running(pid, started)

    await end_process(pid, started, 5, 5)

    assert not is_running(pid, started)
    await end_process(pid, started, 5, 5)
    os.close(read)
    os.close(write)


def test_the_registry_makes_what_is_built_and_says_what_is_not(tmp_path):
    assert [load_backend(name, tmp_path).name for name in BUILT] == ["local"]
    for name in NOT_BUILT:
        with pytest.raises(NotImplementedHere, match=f"'{name}' is not built yet"):
            load_backend(name, tmp_path)
    with pytest.raises(InvalidRequest, match="no backend 'mainframe'"):
        load_backend("mainframe", tmp_path)


async def test_a_checkpoint_of_an_older_version_is_read(make_backend):
    backend = make_backend()
    handle = await create(backend)
    record = backend._folder / ONE / "handle.json"
    document = json.loads(record.read_text())
    del document["certificate"]
    record.write_text(json.dumps(document))

    assert await backend.list_owned("me") == [handle]
    await backend.destroy(handle)


async def test_the_key_of_a_tls_agent_is_told_to_nobody_else(make_backend):
    listens = LISTENS.replace("listener =", "import os\nos.mkdir(config['base_dir'])\nwhere = {'tls': ['127.0.0.1', 7]}\n"
                              "json.dump(where, open(config['base_dir'] + '/listening.json', 'w'))\nlistener =", 1)  # fmt: skip
    backend = make_backend(listens, transport="tls")
    handle = await create(backend)
    told = json.loads((backend._folder / ONE / "agent.sock.config").read_text())["listen"]["tls"]
    seen = Path(f"/proc/{handle.data['pid']}/cmdline").read_bytes() + Path(f"/proc/{handle.data['pid']}/environ").read_bytes()

    assert handle.address == "tls:127.0.0.1:7"
    assert (told["host"], told["port"], told["certificate"]) == ("127.0.0.1", 0, handle.certificate)
    assert told["key"].startswith("-----BEGIN PRIVATE KEY-----")
    assert "PRIVATE KEY" not in (backend._folder / ONE / "handle.json").read_text() + repr(handle)
    assert b"PRIVATE KEY" not in seen
    await backend.destroy(handle)


def test_each_agent_has_a_certificate_of_its_own():
    one, two = make_certificate("s-1"), make_certificate("s-1")

    assert one.certificate != two.certificate
    assert one.key != two.key


async def test_the_agent_is_unpacked_once_under_the_name_of_its_content(tmp_path):
    backend = make_local_backend(tmp_path, "me")
    first = backend._agent()

    assert backend._agent() == first
    assert (first / "__main__.py").is_file()
    assert [path.name for path in (tmp_path / "agent").iterdir()] == [first.name]


async def test_the_agent_is_packed_once_whatever_the_number_of_sandboxes(monkeypatch, tmp_path):
    packed, members = [], build._members()
    monkeypatch.setattr(build, "_members", lambda: packed.append(1) or members)
    content.cache_clear()
    backend = make_local_backend(tmp_path, "me")

    folders = [await asyncio.to_thread(backend._agent) for _ in range(3)]

    assert packed == [1]
    assert len(set(folders)) == 1
    assert (folders[0] / "__main__.py").exists()

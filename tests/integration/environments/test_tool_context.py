"""Tests of the tool context of reward functions with a real slot: in plain functions, in threads, and inside a running event loop."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from env_client import AsyncSandboxClient, CallGatherer, ClientClosed, FileNotFound, InvalidRequest, Lease, LeaseLost, RetryPolicy, SandboxClient, SandboxError
from environments.folder_archives import FolderTooLarge
from environments.tool_context import ToolContext, ToolFault, ToolServerMissing
from tests.support.service import Service, running_service


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[SandboxClient]:
    with SandboxClient(service.url, service.token) as opened:
        yield opened


@pytest.fixture
def lease(client: SandboxClient) -> Iterator[Lease]:
    with client.lease(trajectory_id="t-1", wait_s=60) as held:
        yield held


@pytest.fixture
def context(client: SandboxClient, lease: Lease) -> ToolContext:
    return ToolContext(client, lease.info)


def test_commands(context: ToolContext) -> None:
    assert (context.trajectory_id, context.workspace) == ("t-1", "/workspace")
    assert context.terminal("echo hello; exit 3") == {"exit_code": 3, "output": "hello\n"}
    assert context.terminal("pwd", cwd="/tmp") == {"exit_code": 0, "output": "/tmp\n"}
    late = context.terminal("echo begun; sleep 60", timeout=0.3)
    assert (late["exit_code"], late["output"], bool(late["error"])) == (None, "begun\n", True)
    assert context.terminal("seq 400000")["truncated"]
    assert context.fault is None


def test_a_shell_that_stays(context: ToolContext) -> None:
    assert context.terminal_stateful("cd /tmp; x=7; f() { echo f $x; }") == {"exit_code": 0, "output": "", "session": "kept"}
    assert context.terminal_stateful("pwd; f") == {"exit_code": 0, "output": "/tmp\nf 7\n", "session": "kept"}
    assert context.terminal_stateful("pwd", session="other")["output"] == "/workspace\n"
    assert context.terminal_stateful("exit 3") == {"exit_code": 3, "output": "", "session": "restarted"}
    late = context.terminal_stateful("y=1; sleep 60", timeout=0.3)
    assert (late["exit_code"], bool(late["error"])) == (None, True)
    ended = json.loads(context.call_tool("terminal_stateful", {"command": "exit 4"}))
    assert (ended["exit_code"], "the next command gets a new shell" in ended["session_reason"]) == (4, True)
    assert context.fault is None


def test_the_terminal_of_the_slot(context: ToolContext) -> None:
    typed = context.tmux("send_keys", keys=["echo $((6 * 7))", "Enter"], block=True)
    assert "42" in typed["output"].split()
    assert "recording" in typed["metadata"]
    assert "keys" in context.tmux("send_keys", keys=42)["error"]
    assert context.fault is None


def test_file_tools(context: ToolContext) -> None:
    assert context.write_file("src/a.py", "x = 1\ny = 2\n") == {"size_bytes": 12}
    assert context.read_file("src/a.py") == {"content": "x = 1\ny = 2\n"}
    assert context.search(r"^y", "src", glob="*.py") == {"output": "src/a.py:2:y = 2\n", "matches": 1}
    assert "no such file" in context.read_file("missing")["error"].lower()
    assert "error" in context.write_file("/proc/none", "x")
    assert "error" in context.search("(")
    assert context.terminal("seq 100000 > large").get("exit_code") == 0
    assert context.read_file("large") == {"content": "".join(f"{number}\n" for number in range(1, 100_001))}
    assert context.fault is None


def test_files_and_folders_are_copied(context: ToolContext, tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "deep").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "b.bin").write_bytes(bytes(range(256)))

    context.upload_dir(source, "tests")
    context.upload_file(source / "deep" / "run.sh", "bin/run.sh")
    assert context.terminal("tests/deep/run.sh && bin/run.sh") == {"exit_code": 0, "output": "ran\nran\n"}
    context.terminal("ln -s /etc/passwd tests/link; mkfifo tests/pipe; echo new > tests/new")

    assert context.download_file("tests/b.bin", tmp_path / "in" / "b.bin") == 256
    folder = context.download_dir("tests", tmp_path / "copy")
    assert (tmp_path / "in" / "b.bin").read_bytes() == bytes(range(256))
    assert sorted(path.name for path in (tmp_path / "copy").rglob("*")) == ["b.bin", "deep", "new", "run.sh"]
    assert (folder.file_count, "link" in folder.skipped) == (3, True)
    with pytest.raises(FileNotFound):
        context.download_file("tests/missing", tmp_path / "missing")
    with pytest.raises(FolderTooLarge):
        context.download_dir("tests", tmp_path / "small", max_bytes=100)
    assert context.fault is None


def test_any_tool_by_name(context: ToolContext) -> None:
    assert json.loads(context.call_tool("bash", {"command": "echo hi"})) == {"output": "hi\n", "exit_code": 0}
    started = json.loads(context.call_tool("process", {"action": "start", "command": "sleep 30"}))
    assert (started["state"], bool(started["process_id"])) == ("running", True)
    assert json.loads(context.call_tool("list_files"))["output"]
    with pytest.raises(InvalidRequest, match="no tool"):
        context.call_tool("sudo")
    assert context.fault is None


@pytest.mark.parametrize(
    ("tool", "call"),
    [
        ("web_search", lambda context: context.web_search("x")),
        ("web_extract", lambda context: context.web_extract(["http://x"])),
        ("browser_navigate", lambda context: context.browser_navigate("http://x")),
        ("browser_snapshot", lambda context: context.browser_snapshot()),
        ("browser_click", lambda context: context.call_tool("browser_click", {"ref": "x"})),
    ],
)
def test_tools_of_a_tool_server_say_that_it_is_not_built(context: ToolContext, tool: str, call: Callable[[ToolContext], Any]) -> None:
    with pytest.raises(ToolServerMissing, match=f"{tool} needs a tool server, which is not built yet"):
        call(context)


def test_from_many_threads_at_once(client: SandboxClient) -> None:
    with client.gang(4, wait_s=60) as leases, ThreadPoolExecutor(16) as threads:
        contexts = [ToolContext(client, lease.info) for lease in leases]
        for number, context in enumerate(contexts):
            context.write_file("name", str(number))

        def read(number: int) -> str:
            return str(contexts[number % 4].terminal(f"cat name; echo -{number}")["output"])

        outputs = list(threads.map(read, range(48)))

    assert outputs == [f"{number % 4}-{number}\n" for number in range(48)]


async def test_inside_the_event_loop_that_serves_the_rollouts(service: Service, client: SandboxClient) -> None:
    async with AsyncSandboxClient(service.url, service.token) as rollouts, rollouts.gang(2, wait_s=60) as (lease, other), CallGatherer(rollouts) as gatherer:
        running = asyncio.ensure_future(gatherer.execute(other.call("bash", {"command": "sleep 0.5; echo done"})))
        await gatherer.execute(lease.call("bash", {"command": "echo kept > file"}))
        context = ToolContext(client, lease.info)

        async def compute_reward(context: ToolContext) -> float:
            return 1.0 if context.terminal("cat file")["output"] == "kept\n" else 0.0

        def compute_reward_plainly(context: ToolContext) -> float:
            return 1.0 if context.read_file("file")["content"] == "kept\n" else 0.0

        async with asyncio.timeout(20):
            assert await compute_reward(context) == 1.0
            assert compute_reward_plainly(context) == 1.0
            assert await asyncio.to_thread(compute_reward_plainly, context) == 1.0
            assert await asyncio.to_thread(asyncio.run, compute_reward(context)) == 1.0
            assert await asyncio.gather(*(compute_reward(context) for _ in range(5))) == [1.0] * 5
            assert (await running).output == "done\n"  # the rollouts go on


async def test_a_reward_function_that_blocks_the_event_loop_for_long_is_logged_once(
    client: SandboxClient, lease: Lease, caplog: pytest.LogCaptureFixture
) -> None:
    context = ToolContext(client, lease.info, max_loop_block_s=0.2)
    with caplog.at_level(logging.WARNING, "environments.tool_context"):
        await asyncio.to_thread(context.terminal, "sleep 0.3")
        assert caplog.messages == []
        context.terminal("sleep 0.3")
        context.terminal("sleep 0.3")

    assert len(caplog.messages) == 1
    assert "trajectory t-1 blocked its event loop" in caplog.messages[0]


def test_a_lost_lease_is_no_bad_reward(client: SandboxClient) -> None:
    with client.lease(wait_s=60) as lease:
        context = ToolContext(client, lease.info)
        lease.release()
        with pytest.raises(LeaseLost) as lost:
            context.terminal("true")
        with pytest.raises(LeaseLost):
            context.read_file("x")

    assert context.fault is lost.value


def test_a_lost_sandbox_is_no_bad_reward() -> None:
    with running_service() as own, SandboxClient(own.url, own.token, retry=RetryPolicy(total_s=1.0)) as client:
        (lease,) = client.hold(1, wait_s=60)
        context = ToolContext(client, lease.info)
        with ThreadPoolExecutor(1) as threads:
            scoring = threads.submit(context.terminal, "touch begun; sleep 60", 60)
            while not lease.bash("test -e begun").success:
                time.sleep(0.05)
            for record in own.state_dir.glob("sandboxes/*/handle.json"):
                os.kill(json.loads(record.read_text(encoding="utf-8"))["data"]["pid"], signal.SIGKILL)
            with pytest.raises(SandboxError) as failed:
                scoring.result(30)
        assert isinstance(failed.value, ToolFault)
        assert (failed.value.result.reason, failed.value.result.fault, context.fault) == ("sandbox_lost", "infra", failed.value)

        own.process.send_signal(signal.SIGKILL)
        own.process.wait()
        other = ToolContext(client, lease.info)
        with pytest.raises(SandboxError):
            other.terminal("true")
        assert isinstance(other.fault, SandboxError)


def test_cleanup_ends_what_runs_in_other_threads(context: ToolContext, lease: Lease) -> None:
    with ThreadPoolExecutor(1) as threads:
        scoring = threads.submit(context.terminal, "touch begun; sleep 60", 60)
        while not lease.bash("test -e begun").success:
            time.sleep(0.05)
        began_s = time.monotonic()
        context.cleanup()
        with pytest.raises(ClientClosed, match="scoring of its rollout has ended"):
            scoring.result(30)

    assert time.monotonic() - began_s < 20
    for call in (context.terminal, context.read_file, context.upload_dir):
        with pytest.raises(ClientClosed):
            call(".", ".") if call == context.upload_dir else call("x")  # type: ignore[operator]
    context.cleanup()
    assert context.fault is None
    assert lease.bash("true").success


def test_contexts_start_no_threads(client: SandboxClient, lease: Lease) -> None:
    before = threading.active_count()
    for _ in range(50):
        ToolContext(client, lease.info).terminal("true")

    assert threading.active_count() == before
    assert len(psutil.Process().net_connections()) < 50

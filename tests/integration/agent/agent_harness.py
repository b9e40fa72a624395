"""A real agent in a process of its own on a real unix socket, and functions for the requests of tests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import secrets
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from sandbox_server.agent import wire
from sandbox_server.agent.build import content
from sandbox_server.agent.kernel.trash import delete_tree
from sandbox_server.link import AgentEndpoint, AgentLink, connect
from tests.support.users import Runner

TOKEN = "the agent's token"
START_WITHIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The result of one call."""

    meta: dict[str, Any]
    body: bytes

    @property
    def reason(self) -> str:
        return str(self.meta["reason"])

    @property
    def code(self) -> int | None:
        code: int | None = self.meta["exit_code"]
        return code

    @property
    def error(self) -> str:
        return str(self.meta["error"])

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def metadata(self) -> dict[str, Any]:
        metadata: dict[str, Any] = self.meta["metadata"]
        return metadata


@dataclass(kw_only=True)
class AgentHarness:
    """A running agent, and a link to it."""

    link: AgentLink
    process: subprocess.Popen[bytes]
    folder: Path
    mode: str
    epochs: dict[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)  # the slots that the test has sent requests to

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def inits(self) -> list[psutil.Process]:
        """The first process of every slot, as the host sees it."""
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                is_executed = any("agent.init.init" in part for part in child.cmdline()) and "bwrap" not in child.name()
                if is_executed or child.name() == "slot-init":
                    found.append(child)
        return found

    def templates(self) -> list[psutil.Process]:
        """The templates that the inits of slots are forked from."""
        return [child for child in psutil.Process(self.process.pid).children() if child.name() == "slot-template"]

    def epoch(self, slot: str) -> int:
        """The current epoch of a slot, which every request to it must name."""
        self.used.add(slot)
        return self.epochs.get(slot, 1)

    async def call(self, tool: str, slot: str = "0", call_id: str | None = None, timeout_s: float = 30.0, **fields: Any) -> Answer:
        args = fields.pop("args", None)
        spec = {"call_id": call_id or secrets.token_hex(4), "tool": tool, "args": args or {}, "timeout_s": timeout_s, **fields}
        return (await self.calls([spec], slot))[0]

    async def bash(self, command: str, slot: str = "0", **fields: Any) -> Answer:
        args = {"command": command, **{name: fields.pop(name) for name in ("cwd", "env", "stdin") if name in fields}}
        return await self.call("bash", slot, args=args, **fields)

    async def calls(self, specs: list[dict[str, Any]], slot: str = "0") -> list[Answer]:
        answers: list[Answer] = []
        async with self.link.stream({"op": "calls", "slot": slot, "epoch": self.epoch(slot)}) as stream:
            for spec in specs:
                stream.send_item(spec)
            stream.end()
            answers.extend([Answer(meta=event.meta, body=event.body) async for event in stream if isinstance(event, wire.Item)])
        return answers

    async def ask(self, op: str, slot: str = "0", **fields: Any) -> dict[str, Any]:
        return dict(await self.link.request({"op": op, "slot": slot, "epoch": self.epoch(slot), **fields}))

    async def reset(self, slot: str = "0", **fields: Any) -> dict[str, Any]:
        self.epochs[slot] = self.epoch(slot) + 1
        return await self.ask("reset", slot, network=fields.pop("network", True), **fields)

    async def data(self, op: str, slot: str = "0", **fields: Any) -> tuple[bytes, dict[str, Any]]:
        """All data that a stream sends, and the payload of its end."""
        chunks, meta = [], {}
        async with self.link.stream({"op": op, "slot": slot, "epoch": self.epoch(slot), **fields}) as stream:
            async for event in stream:
                if isinstance(event, wire.Data):
                    chunks.append(event.body)
                elif isinstance(event, wire.Ended):
                    meta = event.meta
        return b"".join(chunks), meta

    async def until(self, command: str, slot: str = "0", within_s: float = 60.0) -> None:
        """Wait until a command succeeds in the slot."""
        answer = await self.bash(f"until {command}; do sleep 0.02; done", slot, timeout_s=within_s)
        assert answer.reason == "exit", f"{command} did not come true within {within_s} s"


@dataclass(kw_only=True)
class AgentProcess:
    """The process of an agent, and the folder with its socket."""

    process: subprocess.Popen[bytes]
    folder: Path
    mode: str
    is_spoiled: bool = False


@functools.cache
def _zipapp() -> bytes:
    """The agent's zipapp, built once per worker."""
    return content()


@contextlib.contextmanager
def agent_process(runner: Runner, mode: str, prefix: Sequence[str] = (), **settings: Any) -> Iterator[AgentProcess]:
    """Start an agent, by the command `prefix` if there is one, and wait until it listens; end it afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="agent-", dir="/tmp"))
    folder.chmod(0o711)
    base = folder / "base"
    base.mkdir(mode=0o700)
    pyz = folder / "agent.pyz"
    pyz.write_bytes(_zipapp())
    for path in (folder, base, pyz):
        runner.own(path)
    config = {
        "sandbox_id": "s-" + secrets.token_hex(4),
        "token": TOKEN,
        "listen": {"unix": str(folder / "agent.sock")},
        "base_dir": str(base),
        "workspace_base": str(folder / "ws"),
        "slots": 2,
        "isolation": mode,
        "allow_none": mode == "none",
        "alone_exit_s": 600.0,  # one agent may be idle during the tests of many others
        **settings,
    }
    environ = {"PATH": os.environ["PATH"], **{name: value for name, value in runner.environ.items() if name == "LD_LIBRARY_PATH"}}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*prefix, runner.python, "-I", "-B", str(pyz)], stdin=subprocess.PIPE, stderr=log, env=environ, cwd="/", **runner.popen_options
        )
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(json.dumps(config).encode())
    try:
        _wait_for_socket(folder, process)
        yield AgentProcess(process=process, folder=folder, mode=mode)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(OSError):  # processes that a killed agent has left running may still write there
            delete_tree(str(folder))  # deeper than shutil.rmtree goes


def lives(process: psutil.Process) -> bool:
    """Whether a process runs. One that has ended and has not been reaped does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def wait_for_ends(processes: Sequence[psutil.Process], within_s: float = 10.0) -> list[psutil.Process]:
    """Wait until processes have ended, and not until they were reaped, which the machine may do much later. Returns those that still live after the time."""
    deadline = time.monotonic() + within_s
    while (living := [process for process in processes if lives(process)]) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    return living


def _wait_for_socket(folder: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_WITHIN_S
    while not (folder / "agent.sock").exists():
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < deadline, "the agent does not listen"
        time.sleep(0.01)


@contextlib.asynccontextmanager
async def connected(agent: AgentProcess) -> AsyncIterator[AgentHarness]:
    """A link to a running agent, all of whose slots are ready."""
    link = await connect(AgentEndpoint(address=f"unix:{agent.folder}/agent.sock", token=TOKEN), START_WITHIN_S)
    try:
        harness = AgentHarness(link=link, process=agent.process, folder=agent.folder, mode=agent.mode)
        await _all_ready(harness)
        yield harness
    finally:
        await link.close()


async def _all_ready(harness: AgentHarness) -> None:
    assert harness.link.hello["isolation"] == harness.mode, dict(harness.link.hello)
    states: dict[str, str] = {}
    async with harness.link.stream({"op": "watch"}) as stream:
        async for event in stream:
            for slot in event.meta["slots"]:
                states[slot["slot_id"]] = slot["state"]
                harness.epochs[slot["slot_id"]] = slot["epoch"]
            assert not {"broken", "quarantined"} & set(states.values()), event.meta
            if states and set(states.values()) == {"ready"}:
                return

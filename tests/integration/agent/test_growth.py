"""Ended requests leave nothing behind in an agent, which a service may use for years over one connection."""

from __future__ import annotations

import asyncio
import gc
import secrets
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_server.agent import wire
from sandbox_server.agent.config import AgentConfig, Listen
from sandbox_server.agent.kernel.trash import delete_tree
from sandbox_server.agent.server.agent import Agent
from sandbox_server.link import AgentEndpoint, AgentLink, connect
from tests.integration.agent.agent_harness import Answer

TOKEN = "t"
CYCLES = 6
REQUESTS_A_CYCLE = 20


@pytest.fixture
async def link() -> AsyncIterator[AgentLink]:
    """A link to an agent that runs in this process."""
    folder = Path(tempfile.mkdtemp(prefix="growth-", dir="/tmp"))
    folder.chmod(0o711)
    (folder / "base").mkdir(mode=0o700)
    config = AgentConfig(
        sandbox_id="s-" + secrets.token_hex(4),
        token=TOKEN,
        listen=Listen(str(folder / "agent.sock")),
        base_dir=str(folder / "base"),
        workspace_base=str(folder / "ws"),
        slots=1,
        isolation="bwrap",
    )
    agent = Agent(config)
    running = asyncio.create_task(agent.run_agent())
    while not (folder / "agent.sock").exists():
        await asyncio.sleep(0.01)
    link = await connect(AgentEndpoint(address=f"unix:{folder}/agent.sock", token=TOKEN), 30.0)
    async with link.stream({"op": "watch"}) as stream:
        async for event in stream:
            if [slot["state"] for slot in event.meta["slots"]] == ["ready"]:
                break
    yield link
    await link.close()
    agent.stopping.set()
    await running
    delete_tree(str(folder))


async def cycle(link: AgentLink, epoch: int) -> int:
    """One lease: a call, many small requests, refused ones among them, and a reset. Returns the next epoch."""
    call_id = secrets.token_hex(4)
    async with link.stream({"op": "calls", "slot": "0", "epoch": epoch}) as stream:
        stream.send_item({"call_id": call_id, "tool": "bash", "args": {"command": "echo fine; sleep 0.02"}, "timeout_s": 30.0})
        stream.end()
        (answer,) = [Answer(meta=event.meta, body=event.body) async for event in stream if isinstance(event, wire.Item)]
    assert answer.text == "fine\n"
    for _ in range(REQUESTS_A_CYCLE):
        await link.request({"op": "stats"})
        assert (await link.request({"op": "cancel", "slot": "0", "epoch": epoch, "call_id": "none"}))["found"] is False
        async with link.stream({"op": "output", "slot": "0", "epoch": epoch, "call_id": call_id}) as stream:
            async for _event in stream:
                pass
    assert (await link.request({"op": "reset", "slot": "0", "epoch": epoch + 1, "network": True}))["state"] == "ready"
    return epoch + 1


def kept() -> Counter[str]:
    """How many objects of the agent's classes exist."""
    gc.collect()
    return Counter(type(thing).__qualname__ for thing in gc.get_objects() if str(type(thing).__module__).startswith("sandbox_server.agent"))


async def test_ended_requests_and_leases_leave_no_objects_behind(link: AgentLink) -> None:
    epoch = 1
    for _ in range(3):
        epoch = await cycle(link, epoch)
    before = kept()
    for _ in range(CYCLES):
        epoch = await cycle(link, epoch)

    assert {name: count for name, count in (kept() - before).items() if count > 2} == {}

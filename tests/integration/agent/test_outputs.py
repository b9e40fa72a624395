"""Whole outputs: of running and ended calls, kept apart or together, from an offset, and very large ones."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
import pytest

from sandbox_server.agent import wire
from sandbox_server.link import AgentRefused, AgentStream
from tests.integration.agent.agent_harness import AgentHarness
from tests.integration.agent.conftest import Maker

TWO = "printf out; printf err >&2"


async def _stream(harness: AgentHarness, op: str, **fields: Any) -> tuple[bytes, list[dict[str, Any]]]:
    body, items = b"", []
    async with harness.link.stream({"op": op, "slot": "0", "epoch": harness.epoch("0"), **fields}) as stream:
        async for event in stream:
            if isinstance(event, wire.Data):
                body += event.body
            elif isinstance(event, wire.Item):
                items.append(event.meta)
    return body, items


async def test_the_description_of_an_output_comes_before_its_bytes(bwrap: AgentHarness) -> None:
    await bwrap.bash("seq 100000", call_id="c", output_limit_bytes=100)
    body, items = await _stream(bwrap, "output", call_id="c", offset=10)

    assert items == [{"state": "done", "total_bytes": 588895, "available_bytes": 588895}]
    assert body == b"".join(b"%d\n" % number for number in range(1, 100001))[10:]


async def test_separate_streams_are_sent_one_after_the_other(bwrap: AgentHarness) -> None:
    await bwrap.bash(TWO, call_id="c", separate_streams=True)
    for offset, expected in ((0, b"outerr"), (2, b"terr"), (3, b"err"), (5, b"r"), (6, b""), (99, b"")):
        assert (await _stream(bwrap, "output", call_id="c", offset=offset))[0] == expected
        body, items = await _stream(bwrap, "attach", call_id="c", offset=offset)
        assert body == expected
        assert items[-1]["reason"] == "exit"


async def test_a_running_call_shows_both_streams(bwrap: AgentHarness) -> None:
    running = asyncio.create_task(bwrap.bash(f"{TWO}; touch up; until [ -e go ]; do sleep 0.02; done; printf more", call_id="c", separate_streams=True))
    await bwrap.until("test -e up")
    attached = asyncio.create_task(_stream(bwrap, "attach", call_id="c"))
    while (await bwrap.ask("call_status", call_id="c"))["output_bytes"] < 6:
        await asyncio.sleep(0.01)
    body, items = await _stream(bwrap, "output", call_id="c")
    await bwrap.bash("touch go")
    await running

    assert (items, body) == ([{"state": "running", "total_bytes": 6, "available_bytes": 6}], b"outerr")
    assert (await attached)[0] == b"outmoreerr"


async def test_output_without_end_does_not_delay_other_slots(make_harness: Maker) -> None:
    harness = await make_harness(spool_bytes=1 << 20)
    flood = asyncio.create_task(harness.bash("yes", timeout_s=2.5))
    await asyncio.sleep(0.3)
    agent = psutil.Process(harness.process.pid)
    used, began = sum(agent.cpu_times()[:2]), time.monotonic()
    took = []
    while time.monotonic() - began < 1.5:
        at = time.monotonic()
        await harness.bash("true", "1")
        took.append(time.monotonic() - at)
        await asyncio.sleep(0.05)
    share = (sum(agent.cpu_times()[:2]) - used) / (time.monotonic() - began)
    answer = await flood

    assert answer.reason == "timeout"
    assert answer.meta["output_bytes"] > 50 << 20
    assert sorted(took)[len(took) // 2] < 0.2
    assert share < 0.6, f"the agent took {share:.2f} of a processor"


async def _head_and_output(harness: AgentHarness, stream: AgentStream, call_id: str) -> tuple[dict[str, Any], bytes]:
    async for event in stream:
        if isinstance(event, wire.Item):
            assert event.meta["output_waits"]
            return event.meta, (await _stream(harness, "result_output", call_id=call_id))[0]
    raise AssertionError("the stream ended")


async def test_the_next_call_begins_after_a_large_output_was_fetched(make_harness: Maker) -> None:
    harness = await make_harness(spool_bytes=24 << 20)
    size = 8 << 20
    async with harness.link.stream({"op": "calls", "slot": "0", "epoch": 1, "fetches_outputs": True}) as stream:
        for call_id in ("one", "two"):
            args = {"command": f"touch {call_id}; head -c {size} /dev/zero | tr '\\0' {call_id[0]}"}
            stream.send_item({"call_id": call_id, "tool": "bash", "args": args, "timeout_s": 30.0, "output_limit_bytes": size})
        stream.end()
        await harness.until("test -e one")
        # Other outputs fill the spool meanwhile. An output that is to be fetched is not deleted.
        for _ in range(4):
            await harness.bash(f"head -c {size} /dev/zero", output_limit_bytes=10)
        assert (await harness.bash("ls")).text == "one\n"
        first, output = await _head_and_output(harness, stream, "one")
        assert (first["lens"], output) == ([size], b"o" * size)
        second, output = await _head_and_output(harness, stream, "two")
        assert (second["lens"], output) == ([size], b"t" * size)


async def test_results_that_are_not_taken_use_a_bounded_amount_of_memory(make_harness: Maker) -> None:
    harness = await make_harness()
    await harness.bash("true")
    agent = psutil.Process(harness.process.pid)
    before = agent.memory_info().rss
    metas = [
        {"call_id": f"c{n}", "tool": "bash", "args": {"command": "head -c 10485760 /dev/zero"}, "timeout_s": 30.0, "output_limit_bytes": 10 << 20}
        for n in range(4)  # together far more than the agent may use, and each far more than the flow-control window
    ]
    async with harness.link.stream({"op": "calls", "slot": "0", "epoch": 1, "fetches_outputs": True}) as stream:
        for meta in metas:
            stream.send_item(meta)
        stream.end()
        for meta in metas:
            assert len((await _head_and_output(harness, stream, meta["call_id"]))[1]) == 10 << 20
            assert agent.memory_info().rss - before < 16 << 20
    async with harness.link.stream({"op": "calls", "slot": "0", "epoch": 1, "fetches_outputs": True}) as stream:
        for n in range(200):
            stream.send_item({"call_id": f"small{n}", "tool": "bash", "args": {"command": "head -c 50000 /dev/zero"}, "timeout_s": 30.0})
        stream.end()
        # The client does not read. The flow-control window and one more result are used, then the calls wait.
        for _ in range(50):
            await harness.bash("true")
        with pytest.raises(AgentRefused, match="small199"):
            await harness.ask("call_status", call_id="small199")
    assert agent.memory_info().rss - before < 24 << 20

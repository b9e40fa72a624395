"""The processor time that client, gatherer and dispatch take for one tool call, with a service that costs next to nothing."""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import httpx

from env_client.client import AsyncSandboxClient
from env_client.gatherer import CallGatherer
from env_client.leases import BaseLease
from env_client.tools import SlotTools
from env_client.values import LeaseInfo
from tests.support.scripted_responses import URL, a_result

TRAJECTORIES = 200
TURNS = 5
ROUNDS = 7
MAX_PROCESSOR_S = 0.002


class EchoService(httpx.AsyncBaseTransport):
    """Answers each call of a batch a moment later."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        calls = json.loads(request.content)["calls"]
        await asyncio.sleep(0.002)
        return httpx.Response(200, content=b"".join(json.dumps(a_result(call["call_id"], call["lease_id"])).encode() + b"\n" for call in calls))


async def test_one_call_of_200_concurrent_trajectories_takes_less_than_2_ms() -> None:
    client = AsyncSandboxClient(URL, "s3cret", transport=EchoService())
    async with client, CallGatherer(client) as gatherer:
        tools = [SlotTools(BaseLease(LeaseInfo(lease_id=f"l-{number}")), gatherer, timeout_s=30) for number in range(TRAJECTORIES)]

        async def trajectory(tool: SlotTools) -> None:
            for _ in range(TURNS):
                assert json.loads(await tool.call_tool("terminal", {"command": "true", "timeout": 5}))["exit_code"] == 0

        processor_s = []
        for _ in range(ROUNDS):
            began_s = time.thread_time()
            await asyncio.gather(*(trajectory(tool) for tool in tools))
            processor_s.append((time.thread_time() - began_s) / (TRAJECTORIES * TURNS))

    assert statistics.median(processor_s) < MAX_PROCESSOR_S
    assert gatherer.statistics.call_count / gatherer.statistics.request_count > 20

"""Test of an environment that serves a trainer: workers that atroposlib cancels leave no slot behind."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from env_client import AsyncSandboxClient
from environments.demo.model_server import LocalServer
from environments.demo.small_model.policy import CommandPolicy
from environments.demo.small_model.rollout_api import RolloutApi
from environments.demo.small_model.server import PolicyApplication
from environments.demo.small_trainer import find_free_port, running
from environments.demo.tokenizer import TextTokenizer, make_tokenizer
from tests.support.prepared.environments import environments_python
from tests.support.service import Service

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["test"])
    from atroposlib.envs.base import APIServerConfig

    from environments.hermes_base_env import HermesAgentEnvConfig
    from environments.terminal_test_env import TerminalTestEnv

#: How long a condition may take to come true, in seconds.
WAIT_S = 60.0


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[str]:
    """atroposlib's run-api with a trainer that has registered and asked for a batch."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(environments_python()), "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    async with running(command, tmp_path / "run-api.log"), RolloutApi(url) as trainer, httpx.AsyncClient(base_url=url) as http:
        await trainer.wait_until_ready()
        await trainer.register(batch_size=2, max_token_len=8192, num_steps=100)
        assert (await http.get("/batch")).json() == {"batch": None}
        yield url


class Leases:
    """The leases of a service."""

    def __init__(self, client: AsyncSandboxClient) -> None:
        self._client = client

    async def held(self) -> set[str]:
        """Return the leases that are held."""
        return {lease.lease_id for lease in (await self._client.leases()).leases}

    async def wait_for(self, count: int) -> set[str]:
        """Wait until so many leases are held, and return them."""
        async with asyncio.timeout(WAIT_S):
            while len(held := await self.held()) != count:
                await asyncio.sleep(0.05)
        return held

    async def wait_until_ended(self, leases: set[str]) -> None:
        """Wait until none of the leases is held."""
        async with asyncio.timeout(WAIT_S):
            while await self.held() & leases:
                await asyncio.sleep(0.05)


async def make_step(url: str) -> None:
    """Do what another environment and the trainer do in a step: send a group, and take a batch."""
    group: dict[str, Any] = {"tokens": [[1], [1]], "masks": [[1], [1]], "scores": [0.0, 1.0]}
    async with httpx.AsyncClient(base_url=url) as http:
        (await http.post("/scored_data", json=group)).raise_for_status()
        assert (await http.get("/batch")).json()["batch"]


@pytest.mark.timeout(180)
async def test_workers_that_time_out_or_that_an_evaluation_stops_leave_no_slot(service: Service, api: str, tmp_path: Path) -> None:
    tokenizer = TextTokenizer.load(make_tokenizer(tmp_path / "tokenizer"))
    application = PolicyApplication(CommandPolicy(["sleep 1000"], tokenizer), tokenizer)
    async with LocalServer(application) as model, AsyncSandboxClient(service.url, service.token) as client:
        config = HermesAgentEnvConfig(
            **TerminalTestEnv.default_settings(), tokenizer_name=str(tmp_path / "tokenizer"), sandbox_url=service.url, sandbox_token=service.token,
            sandbox_pool="default", rollout_server_url=api, group_size=2, max_num_workers=2, max_batches_offpolicy=2, steps_per_eval=2,
            eval_handling="STOP_TRAIN", eval_item_count=1, worker_timeout=3.0, total_steps=100,
        )  # fmt: skip
        server = APIServerConfig(base_url=model.base_url, api_key="x", model_name="small", server_type="vllm", health_check=False)
        env = TerminalTestEnv(config, [server])
        leases = Leases(client)
        serving = asyncio.create_task(env.env_manager())

        timed_out = await leases.wait_for(4)
        await leases.wait_until_ended(timed_out)
        async with asyncio.timeout(WAIT_S):
            while env.statistics.total.cancelled_count < 4:  # a rollout is counted after its slot was released
                await asyncio.sleep(0.05)
        config.worker_timeout = 600.0

        stopped = await leases.wait_for(4)
        await make_step(api)
        async with asyncio.timeout(WAIT_S):
            while env.curr_step != 1:
                await asyncio.sleep(0.05)
        await make_step(api)  # the step wraps, so that an evaluation begins
        await leases.wait_until_ended(stopped)
        (evaluated,) = await leases.wait_for(1)

        assert evaluated not in stopped
        assert env.workers == set()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert await leases.held() == set()
        assert env.statistics.total.rewards.count == 0

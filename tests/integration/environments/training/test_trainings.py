"""Tests of environments that serve a trainer: a whole training, and workers that atroposlib cancels. Both mostly wait, so they run side by side."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from env_client import AsyncSandboxClient
from environments.demo.model_server import LocalServer
from environments.demo.small_model.policy import CommandPolicy
from environments.demo.small_model.rollout_api import RolloutApi
from environments.demo.small_model.server import PolicyApplication
from environments.demo.small_trainer import Step, TrainerSettings, find_free_port, running, train_here
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
SETTINGS = TrainerSettings(step_count=6)


@asynccontextmanager
async def rollout_api(folder: Path) -> AsyncIterator[str]:
    """atroposlib's run-api with a trainer that has registered and asked for a batch."""
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(environments_python()), "-m", "atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", str(port)]
    async with running(command, folder / "run-api.log"), RolloutApi(url) as trainer, httpx.AsyncClient(base_url=url) as http:
        await trainer.wait_until_ready()
        await trainer.register(batch_size=2, max_token_len=8192, num_steps=100)
        assert (await http.get("/batch")).json() == {"batch": None}
        yield url


class Leases:
    """The leases of a pool."""

    def __init__(self, client: AsyncSandboxClient, pool: str) -> None:
        self._client = client
        self._pool = pool

    async def held(self) -> set[str]:
        """Return the leases that are held."""
        return {lease.lease_id for lease in (await self._client.leases()).leases if lease.pool == self._pool}

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


async def cancel_workers(service: Service, folder: Path) -> None:
    """Serve a trainer with workers that time out, and then with workers that an evaluation stops."""
    tokenizer = TextTokenizer.load(make_tokenizer(folder / "tokenizer"))
    application = PolicyApplication(CommandPolicy(["sleep 1000"], tokenizer), tokenizer)
    async with rollout_api(folder) as api, LocalServer(application) as model, AsyncSandboxClient(service.url, service.token) as client:
        config = HermesAgentEnvConfig(
            **TerminalTestEnv.default_settings(), tokenizer_name=str(folder / "tokenizer"), sandbox_url=service.url, sandbox_token=service.token,
            sandbox_pool="default", rollout_server_url=api, group_size=2, max_num_workers=2, max_batches_offpolicy=2, steps_per_eval=2,
            eval_handling="STOP_TRAIN", eval_item_count=1, worker_timeout=3.0, total_steps=100,
        )  # fmt: skip
        server = APIServerConfig(base_url=model.base_url, api_key="x", model_name="small", server_type="vllm", health_check=False)
        env = TerminalTestEnv(config, [server])
        leases = Leases(client, "default")
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


async def train(service: Service, folder: Path) -> list[Step]:
    """Train, and return the steps."""
    reported: list[Step] = []
    steps = await train_here(SETTINGS, folder, reported.append)  # raises an error if the exit code of the environment is not 0
    assert steps == reported
    async with AsyncSandboxClient(service.url, service.token) as client:
        for pool in await client.pools():
            if pool.name.startswith("rollouts-"):  # the environment leaves it for the next trainer, until it has been idle
                assert await Leases(client, pool.name).held() == set()
                await client.pool_delete(pool.name, force=True)
    return steps


@pytest.fixture(scope="module")
def outcomes(service: Service, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Step] | BaseException, BaseException | None]:
    """The steps of the training and nothing, or the errors with which the two have failed."""

    async def run_both() -> Any:
        work: list[Coroutine[Any, Any, Any]] = [each(service, tmp_path_factory.mktemp("training")) for each in (train, cancel_workers)]
        return await asyncio.gather(*work, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(environments_python()))
        for name, value in service.environ.items():
            patch.setenv(name, value)
        trained, cancelled = asyncio.run(run_both())
        return trained, cancelled


@pytest.mark.timeout(180)
def test_the_mean_reward_rises_and_the_environment_ends_with_the_trainer(outcomes: tuple[list[Step] | BaseException, BaseException | None]) -> None:
    steps, _ = outcomes
    if isinstance(steps, BaseException):
        raise steps

    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0].mean_reward < 0.5
    assert fmean(step.mean_reward for step in steps[-2:]) > max(0.6, steps[0].mean_reward + 0.3)


@pytest.mark.timeout(180)
def test_workers_that_time_out_or_that_an_evaluation_stops_leave_no_slot(outcomes: tuple[list[Step] | BaseException, BaseException | None]) -> None:
    _, error = outcomes
    if error is not None:
        raise error

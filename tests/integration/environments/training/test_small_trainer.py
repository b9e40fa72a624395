"""Test of a whole training: the small trainer, atroposlib's run-api, and an environment that rolls out in the slots of a real service."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest

from env_client import AsyncSandboxClient
from environments.demo.small_trainer import Step, TrainerSettings, train_here
from tests.support.prepared.environments import environments_python
from tests.support.service import Service

SETTINGS = TrainerSettings(step_count=6)


@pytest.mark.timeout(180)
async def test_the_mean_reward_rises_and_the_environment_ends_with_the_trainer(service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(environments_python()))
    for name, value in service.environ.items():
        monkeypatch.setenv(name, value)
    reported: list[Step] = []

    steps = await train_here(SETTINGS, tmp_path, reported.append)  # raises an error if the exit code of the environment is not 0

    assert steps == reported
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[0].mean_reward < 0.5
    assert fmean(step.mean_reward for step in steps[-2:]) > max(0.6, steps[0].mean_reward + 0.3)
    async with AsyncSandboxClient(service.url, service.token) as client:
        assert (await client.leases()).leases == ()
        for pool in await client.pools():
            if pool.name.startswith("rollouts-"):  # the environment leaves it for the next trainer, until it has been idle
                await client.pool_delete(pool.name, force=True)

"""Tests of the pool that the settings of an environment ask for."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from environments.rollouts.pool_spec import PoolSettings, SettingsError, name_pool, plan_pool

#: The names of pools that the service accepts.
POOL_NAME = r"[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?"


def spec(**settings: Any) -> dict[str, Any]:
    request = plan_pool(PoolSettings(**settings))
    assert request.spec is not None
    assert re.fullmatch(POOL_NAME, request.name)
    return dict(request.spec)


def test_the_default_is_a_local_pool_that_goes_by_itself() -> None:
    assert spec() == {
        "backend": "local", "slots_per_sandbox": 10, "min_sandboxes": 1, "max_sandboxes": 10,
        "require_sandbox": False, "require_stateful_sandbox": False, "acquire_timeout_s": 60.0, "delete_after_idle_s": 900.0,
    }  # fmt: skip
    assert plan_pool(PoolSettings()).acquire_timeout_s == 30.0
    assert spec(acquire_timeout_s=90)["acquire_timeout_s"] == 90.0


def test_modal() -> None:
    asked = spec(tool_pool_mode="modal", modal_gpu="T4", modal_secrets="b, a", modal_env_vars="A=1;B=x=y", modal_execution_timeout=45)
    assert asked["modal"] == {"gpu": "T4", "secrets": ["a", "b"]}
    assert (asked["image"], asked["cpu"], asked["memory_mb"], asked["default_timeout_s"]) == ("python:3.11", 1.0, 2048, 45.0)
    assert asked["env_vars"] == {"A": "1", "B": "x=y"}
    assert "workspace_base" not in asked  # only admins may set it
    assert plan_pool(PoolSettings(tool_pool_mode="modal", modal_acquire_timeout=70)).acquire_timeout_s == 70.0


def test_nomad() -> None:
    asked = spec(tool_pool_mode="nomad", nomad_address="http://n:4646", purge_job_on_start=True)
    assert asked["nomad"] == {"address": "http://n:4646", "purge_job_on_start": True}
    asked = spec(tool_pool_mode="nomad", driver="singularity", singularity_image="/a.sif")
    assert asked["nomad"] == {"driver": "singularity", "singularity_image": "/a.sif"}
    assert "image" not in asked


def test_the_older_spelling() -> None:
    assert spec(terminal_backend="modal")["backend"] == "modal"
    assert spec(terminal_backend="docker")["backend"] == "docker"
    assert spec(terminal_backend="singularity", singularity_image="/a.sif")["nomad"]["driver"] == "singularity"


def test_a_pool_by_name() -> None:
    request = plan_pool(PoolSettings(sandbox_pool="mine"))
    assert (request.name, request.spec) == ("mine", None)


def test_the_name_depends_on_the_whole_spec_and_not_on_how_it_is_written() -> None:
    base = PoolSettings(tool_pool_mode="modal", modal_env_vars="A=1;B=2", modal_cpu=1)
    assert plan_pool(base).name == plan_pool(replace(base, modal_env_vars="B=2; A=1", modal_cpu=1.0)).name
    assert plan_pool(base).name.startswith("rollouts-modal-python-3-11-")
    names = {
        plan_pool(replace(base, **{name: value})).name
        for name, value in [("modal_cpu", 2), ("modal_gpu", "T4"), ("modal_env_vars", "A=2"), ("require_sandbox", True)]
    }
    assert len(names | {plan_pool(base).name}) == 5
    assert re.fullmatch(POOL_NAME, name_pool({"backend": "local", "image": "Registry.example/" + "Ä" * 100 + ":latest"}))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tool_pool_mode": "docker"}, "tool_pool_mode: there is no mode 'docker'; there are default, nomad, modal"),
        ({"terminal_backend": "ssh"}, "terminal_backend: 'ssh' is not supported"),
        ({"terminal_backend": "x"}, "terminal_backend: there is no 'x'"),
        ({"terminal_backend": "docker", "tool_pool_mode": "modal"}, "terminal_backend 'docker' and tool_pool_mode 'modal' contradict"),
        ({"sandbox_pool": "mine", "tool_pool_mode": "modal"}, "sandbox_pool .* excludes tool_pool_mode"),
        ({"sandbox_pool": "mine", "require_sandbox": True}, "require_sandbox has no effect on the pool 'mine'"),
        ({"modal_gpu": "T4"}, "modal_gpu has no effect on a pool of the backend local"),
        ({"privileged": True, "driver": "singularity"}, "privileged, driver have no effect"),
        ({"sandbox_image": "x"}, "sandbox_image has no effect"),
        ({"tool_pool_mode": "modal", "slots_per_container": 2}, "slots_per_container has no effect"),
        ({"tool_pool_mode": "nomad", "driver": "x"}, "driver: there is no 'x'"),
        ({"tool_pool_mode": "nomad", "driver": "singularity"}, "singularity_image"),
        ({"tool_pool_mode": "nomad", "singularity_image": "/a.sif"}, "singularity_image"),
        ({"tool_pool_mode": "modal", "modal_env_vars": "A"}, "modal_env_vars: 'A' does not have the form"),
        ({"tool_pool_mode": "modal", "modal_env_vars": "=x"}, "modal_env_vars"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        plan_pool(PoolSettings(**settings))

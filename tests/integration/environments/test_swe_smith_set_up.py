"""Tests of how a commit comes into a slot: from Git servers of both kinds and from this machine, and of rows whose set-up cannot succeed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from environments.dataset_rows import UnusableRow
from environments.rollouts.exec_tool import ExecTool
from environments.rollouts.service import PoolConnection
from environments.swe_smith.repositories import GitServer, LocalRepositories
from environments.swe_smith.rows import parse_row
from environments.swe_smith.set_up import WorkspaceSetUp
from environments.swe_smith.slot_steps import StepFailed, run_step
from tests.support.service import Service
from tests.support.swe.git_server import git_server
from tests.support.swe.repository import BrokenRepository, git, make_repository
from tests.support.swe.slots import connected, service_in_mode, shell, slots

pytestmark = [pytest.mark.timeout(240), pytest.mark.privileged]
UNKNOWN_COMMIT = "0123456789" * 4


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> BrokenRepository:
    made = make_repository(tmp_path_factory.mktemp("repositories"))
    git(made.base, "clone", "-q", "--bare", str(made.folder), str(made.base / "demo" / "plain"))
    git(made.base / "demo" / "plain", "update-server-info")
    return made


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with service_in_mode("bwrap") as running:
        yield running


@pytest.fixture
async def pool(service: Service) -> AsyncIterator[PoolConnection]:
    async with connected(service) as connection:
        yield connection


async def fetch(exec_tool: ExecTool, repository: BrokenRepository, url: str, repo: str = "demo/fairsum", commit: str = "") -> dict[str, Any]:
    request = {"key": f"key-{repo.replace('/', '-')}", "repo": repo, "commit": commit or repository.base_commit, "url": f"{url}/{repo}"}
    return await run_step(exec_tool, "fetch_commit", request, timeout_s=60)


async def test_a_server_that_sends_single_commits(pool: PoolConnection, repository: BrokenRepository) -> None:
    with git_server(repository.base, smart=True) as (url, requests):
        async with slots(pool, 2) as (first, second):
            with pytest.raises(UnusableRow, match=f"the repository demo/fairsum/[.]git has no commit {UNKNOWN_COMMIT}"):
                await fetch(first, repository, url, "demo/fairsum/.git", UNKNOWN_COMMIT)
            with pytest.raises(UnusableRow, match=r"the repository demo/none cannot be found: .*not found"):
                await fetch(first, repository, url, "demo/none")
            asked = len(requests)
            fetched = await fetch(first, repository, url, "demo/fairsum/.git")
            assert fetched["fetched"]
            assert len(requests) > asked
            asked = len(requests)
            again = await fetch(second, repository, url, "demo/fairsum/.git")
            assert (again["pack"], again["fetched"], len(requests)) == (fetched["pack"], False, asked)
            await check_one_commit(second, fetched["pack"], repository)
            assert "full.git" not in await shell(first, "ls /cache/swe_smith/key-demo-plain 2>/dev/null; true")
            assert await shell(first, "ls -A /tmp") == ""


async def test_a_server_that_refuses_single_commits(pool: PoolConnection, repository: BrokenRepository) -> None:
    with git_server(repository.base, smart=False) as (url, _):
        async with slots(pool, 1) as (exec_tool,):
            fetched = await fetch(exec_tool, repository, url, "demo/plain")
            assert "full.git" in await shell(exec_tool, "ls /cache/swe_smith/key-demo-plain")
            await check_one_commit(exec_tool, fetched["pack"], repository)
            with pytest.raises(UnusableRow, match=f"the repository demo/plain has no commit {UNKNOWN_COMMIT}"):
                await fetch(exec_tool, repository, url, "demo/plain", UNKNOWN_COMMIT)
    async with slots(pool, 1) as (exec_tool,):  # the server has ended
        with pytest.raises(StepFailed, match="could not be fetched"):
            await fetch(exec_tool, repository, url, "demo/other")


async def check_one_commit(exec_tool: ExecTool, pack: str, repository: BrokenRepository) -> None:
    await run_step(exec_tool, "check_out", {"pack": pack, "commit": repository.base_commit, "tests": []}, timeout_s=60)
    await exec_tool.narrow(cache="none")
    objects = await shell(exec_tool, "cd repo && git cat-file --batch-all-objects --batch-check && git status --porcelain && git log --format=%H")
    assert objects.endswith(f"\n{repository.base_commit}\n")
    assert (objects.count(" commit "), repository.fix_commit in objects, repository.fix_blob in objects) == (1, False, False)


async def test_rows_that_cannot_be_set_up(pool: PoolConnection, repository: BrokenRepository) -> None:
    set_up = WorkspaceSetUp(LocalRepositories(repository.base), install_timeout_s=60)
    rows = {
        f"the repository demo/fairsum in {repository.folder} has no commit {UNKNOWN_COMMIT}": {"base_commit": UNKNOWN_COMMIT},
        "the repository demo/none is not in": {"repo": "demo/none"},
        "has no file tests/test_missing.py, which its tests are in": {"FAIL_TO_PASS": json.dumps(["tests/test_missing.py::test_x"])},
    }
    async with slots(pool, 1) as (exec_tool,):
        for message, changed in rows.items():
            with pytest.raises(UnusableRow, match=message):
                await set_up.set_up(parse_row(repository.row(**changed)), exec_tool)
    set_up.close()
    with pytest.raises(UnusableRow, match="the repository demo/none is not in"):
        LocalRepositories(repository.base).find("demo/none")
    assert GitServer("http://127.0.0.1:1").url("demo/none") == "http://127.0.0.1:1/demo/none"

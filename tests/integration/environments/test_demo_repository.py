"""Tests of the demo's repository: its commits, its rows, and that its project can be installed and tested in a real slot without network."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from env_client import SandboxClient
from environments.demo.project_files import FAIL_TO_PASS, PASS_TO_PASS
from environments.demo.repository import DemoRepository, RepositoryFailed, make_repository
from environments.demo.trajectories import TrajectoryName, make_script
from tests.support.service import Service


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> DemoRepository:
    return make_repository(tmp_path_factory.mktemp("demo"))


def git(repository: DemoRepository, *words: str) -> str:
    return subprocess.run(["git", "-C", str(repository.folder), *words], capture_output=True, text=True, check=True).stdout.strip()


def outcomes(repository: DemoRepository, commit: str, folder: Path) -> dict[str, bool]:
    """Return whether each test of a commit passes."""
    folder.mkdir()
    subprocess.run(
        ["tar", "-x", "-C", str(folder)],
        input=subprocess.run(["git", "-C", str(repository.folder), "archive", commit], capture_output=True, check=True).stdout,
        check=True,
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", "-q", "--tb=no"]
    run = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": "src", "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.partition(" ") for line in run.stdout.splitlines()]
    return {name.partition(" - ")[0]: word == "PASSED" for word, _, name in lines if word in ("PASSED", "FAILED")}


def test_it_has_two_commits_which_are_the_same_every_time(repository: DemoRepository, tmp_path: Path) -> None:
    assert git(repository, "log", "--format=%H %P").split() == [repository.fix_commit, repository.base_commit, repository.base_commit]
    assert git(repository, "diff", "--numstat", repository.base_commit, repository.fix_commit) == "1\t1\tsrc/durations/parsing.py"
    again = make_repository(tmp_path / "again")
    assert (again.base_commit, again.fix_commit) == (repository.base_commit, repository.fix_commit)
    with pytest.raises(FileExistsError):
        make_repository(tmp_path / "again")


def test_the_tests_of_the_row_fail_before_the_fix_and_pass_after_it(repository: DemoRepository, tmp_path: Path) -> None:
    assert json.loads(repository.dataset.read_text()) == repository.row
    before = outcomes(repository, repository.base_commit, tmp_path / "before")
    assert before == dict.fromkeys(FAIL_TO_PASS, False) | dict.fromkeys(PASS_TO_PASS, True)
    assert outcomes(repository, repository.fix_commit, tmp_path / "after") == dict.fromkeys(before, True)


def test_the_project_can_be_installed_in_a_slot_without_network(repository: DemoRepository, service: Service) -> None:
    files = git(repository, "archive", repository.base_commit)  # text: the project has no other files
    with SandboxClient(service.url, service.token) as client, client.lease(trajectory_id="demo", wait_s=60) as lease:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            member = tarfile.TarInfo("repo.tar")
            data = files.encode()
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        lease.put_archive(".", packed.getvalue())
        installed = lease.bash(
            "mkdir repo && tar -xf repo.tar -C repo && python3 -m venv --system-site-packages --without-pip .env && "
            ".env/bin/python -m pip install --quiet --no-index --no-build-isolation -e ./repo && cd / && "
            "/workspace/.env/bin/python -c \"import durations; print(durations.__file__, durations.parse_duration('1h 30m'))\"",
            timeout_s=100,
        )
        assert installed.output.splitlines()[-1] == "/workspace/repo/src/durations/__init__.py 1800"


def test_broken_rows_are_named_and_the_last_row_can_be_used(repository: DemoRepository, tmp_path: Path) -> None:
    names = repository.write_broken_rows(tmp_path / "broken.jsonl")
    lines = (tmp_path / "broken.jsonl").read_text().splitlines()
    assert [json.loads(line)["instance_id"] for line in lines[: len(names)]] == names
    assert json.loads(lines[-1]) == repository.row
    with pytest.raises(json.JSONDecodeError):
        json.loads(lines[-2])


def test_without_git_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RepositoryFailed, match="needs Git"):
        make_repository(tmp_path / "demo")


def test_the_script_has_a_trajectory_for_each_reward() -> None:
    (prompt,) = make_script().prompts
    assert [trajectory.name for trajectory in prompt.trajectories] == list(TrajectoryName)
    assert prompt.trajectory(7).name == TrajectoryName.FIXES

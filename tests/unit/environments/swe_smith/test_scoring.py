"""Tests of the reward, of the numbers of passed tests, and of where repositories come from."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from environments.dataset_rows import UnusableRow
from environments.swe_smith.in_slot.run_tests import _passed, as_bits
from environments.swe_smith.repositories import CommitPacker, GitServer, LocalRepositories, RepositoryError, parse_base_url
from environments.swe_smith.scoring import TestRun, parse_bits, reward
from tests.support.swe.repository import make_repository


def run(passed: int, *, regressed: bool = False, installs: bool | None = None) -> TestRun:
    return TestRun(passed, 10, regressed, installs=installs)


@pytest.mark.parametrize(
    ("tool_calls", "valid_calls", "tests", "expected"),
    [
        (0, 0, None, 0.0),
        (3, 3, run(10), 1.0),
        (3, 0, run(10), 1.0),
        (3, 3, run(9, installs=True), 0.4),
        (3, 3, run(9, installs=False), 0.15),
        (9, 9, run(9, installs=False), 0.3),
        (9, 0, run(9, installs=False), 0.0),
        (9, 9, run(9, regressed=True, installs=True), 0.0),
        (1, 1, TestRun(0, 0, regressed=False), 0.05),
    ],
)
def test_rewards(tool_calls: int, valid_calls: int, tests: TestRun | None, expected: float) -> None:
    assert reward(tool_calls, valid_calls, tests) == pytest.approx(expected)


@pytest.mark.parametrize(("numbers", "text"), [([], "0"), ([3], "8"), ([0, 1, 2, 5, 7, 8], "1a7")])
def test_numbers_as_text(numbers: list[int], text: str) -> None:
    assert as_bits(numbers) == text
    assert parse_bits(text, 9) == set(numbers)


def test_numbers_beyond_the_tests_are_ignored() -> None:
    assert parse_bits("f" * 1000, 3) == {0, 1, 2}
    assert _passed(b"t 0 passed\nx 1 passed\nt 2 passed\nt 9 passed\nt 1 passed x\n", "t", 3) == {0, 2}


def test_base_urls(tmp_path: Path) -> None:
    assert parse_base_url("https://host/") == GitServer("https://host/")
    assert GitServer("https://host/").url("a/b") == "https://host/a/b"
    assert parse_base_url(str(tmp_path)) == LocalRepositories(tmp_path.resolve())
    for wrong in ("ssh://host", "ftp://host/x", "", str(tmp_path / "missing")):
        with pytest.raises(RepositoryError, match="repo_base_url"):
            parse_base_url(wrong)


def test_one_commit_is_packed_once(tmp_path: Path) -> None:
    repository = make_repository(tmp_path)
    bare = LocalRepositories(tmp_path)
    repository.folder.joinpath(".git").rename(tmp_path / "demo" / "bare.git")
    packer = CommitPacker()

    async def pack_both() -> list[Path]:
        folder = bare.find("demo/bare")
        return list(await asyncio.gather(*(packer.pack(folder, "demo/bare", repository.base_commit) for _ in range(2))))

    first, second = asyncio.run(pack_both())
    listed = subprocess.run(["git", "init", "-q", str(tmp_path / "other")], check=True, capture_output=True)
    subprocess.run(["git", "-C", str(tmp_path / "other"), "index-pack", "--stdin"], input=first.read_bytes(), check=True, capture_output=True)
    listed = subprocess.run(
        ["git", "-C", str(tmp_path / "other"), "cat-file", "--batch-all-objects", "--batch-check"], check=True, capture_output=True, text=True
    )
    assert first == second
    assert listed.stdout.count(" commit ") == 1
    assert repository.fix_blob not in listed.stdout

    for name, commit, message in (
        ("demo/bare", "1" * 40, f"has no commit {'1' * 40}"),
        ("demo/none", repository.base_commit, "the repository demo/none is not in"),
    ):
        with pytest.raises(UnusableRow, match=message):
            asyncio.run(packer.pack(bare.find(name), name, commit))
    (tmp_path / "demo" / "empty").mkdir()
    with pytest.raises(UnusableRow, match="is not a Git repository"):
        asyncio.run(packer.pack(bare.find("demo/empty"), "demo/empty", repository.base_commit))
    packer.close()
    assert not first.exists()

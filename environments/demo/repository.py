"""A small Git repository with a real bug, and the rows that name it as a data set of the kind of SWE-smith does."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.demo.project_files import BUG_LINE, BUG_PATH, FAIL_TO_PASS, FILES, FIXED_LINE, PASS_TO_PASS, PROBLEM_STATEMENT

REPOSITORY = "demo/durations"
INSTANCE_ID = "demo__durations.parse_duration__1"
#: The commits have the same identifiers every time, because nothing in them depends on the machine.
_COMMIT_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "Demo",
    "GIT_AUTHOR_EMAIL": "demo@example.org",
    "GIT_COMMITTER_NAME": "Demo",
    "GIT_COMMITTER_EMAIL": "demo@example.org",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}


class RepositoryFailed(Exception):
    """Git could not make the repository. The message says why."""


@dataclass(frozen=True, slots=True)
class DemoRepository:
    """The repository on this machine.

    Args:
        base_url: the folder that holds `owner/name`, for the setting `repo_base_url`.
        base_commit: the commit with the bug.
        fix_commit: the commit after it, which fixes the bug.
        dataset: the JSONL file with the one row of the repository.
    """

    base_url: Path
    base_commit: str
    fix_commit: str
    dataset: Path

    @property
    def folder(self) -> Path:
        """The folder of the repository."""
        return self.base_url / REPOSITORY

    @property
    def row(self) -> dict[str, Any]:
        """The row of the bug."""
        return _row(self.base_commit)

    def write_broken_rows(self, path: Path) -> list[str]:
        """Write a JSONL file with rows that cannot be used, the usable row after them, and a line that is not JSON.

        Args:
            path: the file.

        Returns:
            The `instance_id` of the rows that cannot be used.
        """
        row = self.row
        without_commit = {key: value for key, value in row.items() if key != "base_commit"}
        broken: list[Mapping[str, Any]] = [
            without_commit | {"instance_id": "missing-field"},
            row | {"instance_id": "unknown-commit", "base_commit": "0123456789" * 4},
            row | {"instance_id": "unknown-repository", "repo": "demo/nothing"},
            row | {"instance_id": "tests-are-not-json", "PASS_TO_PASS": "[tests/test_parsing.py"},
            row | {"instance_id": "tests-are-no-list", "FAIL_TO_PASS": {"tests": 2}},
            row | {"instance_id": "test-without-a-file", "FAIL_TO_PASS": ["tests/test_missing.py::test_nothing"]},
            row | {"instance_id": "no-tests", "FAIL_TO_PASS": [], "PASS_TO_PASS": []},
        ]
        lines = [json.dumps(one) for one in broken]
        path.write_text("\n".join([*lines, "{ this line is not JSON", json.dumps(row)]) + "\n")
        return [str(one["instance_id"]) for one in broken]


def make_repository(folder: Path) -> DemoRepository:
    """Make the repository `demo/durations` in a folder, with the commit that has the bug and the one that fixes it, and the file of its row.

    Args:
        folder: the folder, which is created if it does not exist. It must not hold the repository yet.

    Raises:
        RepositoryFailed: there is no Git, or it failed.
        FileExistsError: the folder holds the repository already.
    """
    repository = folder / REPOSITORY
    repository.mkdir(parents=True)
    _git(repository, "init", "--quiet", "--initial-branch=main")
    for name, content in FILES.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    base_commit = _commit(repository, "Durations as text", "2024-05-01T12:00:00Z")
    (repository / BUG_PATH).write_text(FILES[BUG_PATH].replace(BUG_LINE, FIXED_LINE))
    fix_commit = _commit(repository, "parse_duration adds up all units", "2024-05-02T12:00:00Z")
    dataset = folder / "rows.jsonl"
    dataset.write_text(json.dumps(_row(base_commit)) + "\n")
    return DemoRepository(folder, base_commit, fix_commit, dataset)


def _row(base_commit: str) -> dict[str, Any]:
    return {
        "repo": REPOSITORY,
        "base_commit": base_commit,
        "problem_statement": PROBLEM_STATEMENT,
        "text": f"Solve this issue of {REPOSITORY}:\n\n{PROBLEM_STATEMENT}",
        "PASS_TO_PASS": list(PASS_TO_PASS),
        "FAIL_TO_PASS": list(FAIL_TO_PASS),
        "instance_id": INSTANCE_ID,
    }


def _commit(repository: Path, message: str, date: str) -> str:
    _git(repository, "add", "--all")
    _git(repository, "commit", "--quiet", "--message", message, date=date)
    return _git(repository, "rev-parse", "HEAD")


def _git(repository: Path, *words: str, date: str = "") -> str:
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    dates = {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date} if date else {}
    try:
        done = subprocess.run(["git", *words], cwd=repository, env=own | _COMMIT_ENVIRONMENT | dates, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise RepositoryFailed("The demo needs Git. Install it, and run the demo again.") from error
    except subprocess.CalledProcessError as error:
        raise RepositoryFailed(f"git {words[0]} failed in {repository}: {error.stderr.strip()}") from error
    return done.stdout.strip()

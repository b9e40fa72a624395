"""A row of SWE-smith, checked: the repository, its commit, the problem, and the tests that decide."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal

from environments.dataset_rows import UnusableRow

PromptMode = Literal["problem_statement", "text", "problem_statement+text"]

#: `owner/name`. The parts become names of folders and parts of a URL.
REPOSITORY = re.compile(r"^[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*$")
COMMIT_ID = re.compile(r"^([0-9a-f]{40}|[0-9a-f]{64})$")
#: The most test ids of a row. They are run in chunks, each of which starts a Python process.
MAX_TEST_IDS = 20_000
#: The longest test id, in characters.
MAX_TEST_ID_CHARACTERS = 4_096


@dataclass(frozen=True, slots=True)
class SweRow:
    """A row that can be used.

    Args:
        instance_id: the name of the row.
        repo: `owner/name`.
        base_commit: the full id of the commit that the model starts from.
        problem_statement: what is wrong.
        text: a longer prompt of the data set; may be empty.
        pass_to_pass: the ids of the tests that pass at `base_commit` and must still pass.
        fail_to_pass: the ids of the tests that fail at `base_commit` and must pass.
    """

    instance_id: str
    repo: str
    base_commit: str
    problem_statement: str
    text: str
    pass_to_pass: tuple[str, ...]
    fail_to_pass: tuple[str, ...]

    def scored_tests(self, *, include_fail_to_pass: bool) -> tuple[str, ...]:
        """Return the ids of the tests that decide, each once, in the order of their files."""
        chosen = dict.fromkeys((*self.pass_to_pass, *(self.fail_to_pass if include_fail_to_pass else ())))
        return tuple(sorted(chosen, key=test_file))

    @property
    def is_python(self) -> bool:
        """Whether every test is in a Python file."""
        return all(test_file(test).endswith(".py") for test in (*self.pass_to_pass, *self.fail_to_pass))


def test_file(test_id: str) -> str:
    """Return the file of a test id, such as `tests/test_a.py` of `tests/test_a.py::test_b[1]`."""
    return test_id.split("::", 1)[0]


test_file.__test__ = False  # type: ignore[attr-defined]  # pytest would collect the function in modules that import it


def parse_row(item: Mapping[str, Any]) -> SweRow:
    """Check a row.

    Args:
        item: the columns of the row. The lists of tests are lists, or JSON text of lists.

    Raises:
        UnusableRow: the row cannot be used; the message names the row and its column.
    """
    name = str(item.get("instance_id") or "")
    if not name:
        raise UnusableRow(f"a row has no instance_id; its columns are {', '.join(map(str, item)) or 'none'}")
    repo = _text(item, "repo", name)
    if not REPOSITORY.match(repo) or repo.endswith(".git"):
        raise UnusableRow(f"row {name}: repo must be owner/name, not {repo[:200]!r}")
    base_commit = _text(item, "base_commit", name).strip().lower()
    if not COMMIT_ID.match(base_commit):
        raise UnusableRow(f"row {name}: base_commit must be the full id of a commit in hexadecimal digits, not {base_commit[:200]!r}")
    pass_to_pass, fail_to_pass = _tests(item, "PASS_TO_PASS", name), _tests(item, "FAIL_TO_PASS", name)
    if len(pass_to_pass) + len(fail_to_pass) > MAX_TEST_IDS:
        raise UnusableRow(f"row {name}: it has {len(pass_to_pass) + len(fail_to_pass)} test ids; at most {MAX_TEST_IDS} are run")
    text = item.get("text")
    return SweRow(name, repo, base_commit, _text(item, "problem_statement", name), text if isinstance(text, str) else "", pass_to_pass, fail_to_pass)


def check_row(row: SweRow, *, include_fail_to_pass: bool, python_only: bool, prompt_mode: PromptMode) -> None:
    """Check that a row fits the settings of the environment.

    Raises:
        UnusableRow: it does not; the message names the row.
    """
    if not row.scored_tests(include_fail_to_pass=include_fail_to_pass):
        columns = "PASS_TO_PASS and FAIL_TO_PASS are" if include_fail_to_pass else "PASS_TO_PASS is"
        raise UnusableRow(f"row {row.instance_id}: {columns} empty, so nothing can be scored")
    if python_only and not row.is_python:
        raise UnusableRow(f"row {row.instance_id}: not all of its tests are in Python files, and python_only is set")
    if prompt_mode != "problem_statement" and not row.text:
        raise UnusableRow(f"row {row.instance_id}: the column text is missing or empty, and prompt_mode {prompt_mode!r} uses it")


def build_prompt(row: SweRow, mode: PromptMode) -> str:
    """Return the user message of a row. Paths in it are relative to the workspace, which is in different places in different isolation modes.

    Args:
        row: the row.
        mode: which columns to show.
    """
    shown = {"problem_statement": (row.problem_statement,), "text": (row.text,), "problem_statement+text": (row.problem_statement, row.text)}[mode]
    task = "\n\n".join(part.strip() for part in shown)
    return (
        f"The folder repo of the workspace is the repository {row.repo}. Its source has the problem that is described below. Change the source so that the "
        f"problem is solved. Changes of tests and of their settings do not count: the original tests of the repository decide. In the folder repo, "
        f"`../.env/bin/python -m pytest` runs them. The project and its dependencies are installed in the folder .env, which cannot be changed.\n\n{task}"
    )


def _text(item: Mapping[str, Any], column: str, name: str) -> str:
    value = item.get(column)
    if not isinstance(value, str) or not value.strip():
        raise UnusableRow(f"row {name}: the column {column} is missing or empty")
    return value


def _tests(item: Mapping[str, Any], column: str, name: str) -> tuple[str, ...]:
    value = item.get(column)
    if value is None:
        raise UnusableRow(f"row {name}: the column {column} is missing")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise UnusableRow(f"row {name}: {column} is text that is not JSON: {error}") from error
    if hasattr(value, "tolist"):  # an array of numpy
        value = value.tolist()
    if not isinstance(value, list | tuple) or not all(isinstance(test, str) for test in value):
        raise UnusableRow(f"row {name}: {column} must be a list of test ids, or JSON text of one")
    for test in value:
        _check_test_id(test, column, name)
    return tuple(dict.fromkeys(value))


def _check_test_id(test: str, column: str, name: str) -> None:
    path = PurePosixPath(test_file(test))
    if "::" not in test or path.is_absolute() or not path.name or ".." in path.parts or "\0" in test or len(test) > MAX_TEST_ID_CHARACTERS:
        raise UnusableRow(f"row {name}: {column} has {test[:200]!r}, which is not a test id such as tests/test_a.py::test_b")

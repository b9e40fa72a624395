"""A small real repository with a bug, its tests, and the commit that fixes it, for the tests of swe_smith_oracle."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILES = {
    "pyproject.toml": '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n\n[project]\nname = "fairsum"\nversion = "1.0"\n\n'
    '[tool.pytest.ini_options]\naddopts = "-p no:randomly"\n',
    "src/fairsum/__init__.py": "from fairsum.add import add\n",
    "src/fairsum/add.py": "def add(first, second):\n    return first - second\n",
    "src/fairsum/name.py": 'NAME = "fairsum"\n',
    "tests/conftest.py": "import pytest\n\n\n@pytest.fixture\ndef two():\n    return 2\n",
    "tests/expected.txt": "5\n",
    "tests/test_add.py": "import pathlib\n\nimport pytest\n\nfrom fairsum import add\n\n\n"
    '@pytest.mark.parametrize("other", [1, 3], ids=["one", "three words here"])\ndef test_add(two, other):\n    assert add(two, other) == two + other\n\n\n'
    'def test_expected():\n    assert add(2, 3) == int(pathlib.Path(__file__).with_name("expected.txt").read_text())\n\n\n'
    "def test_zero():\n    assert add(4, 0) == 4\n",
    "tests/test_name.py": "import pytest\n\nfrom fairsum.name import NAME\n\n\ndef test_name():\n    assert NAME == 'fairsum'\n\n\n"
    "@pytest.mark.xfail(reason='not built')\ndef test_later():\n    raise AssertionError\n",
    "tests/test_many.py": "import pytest\n\n\n@pytest.mark.parametrize('number', range(60))\ndef test_many(number):\n    assert number != 57\n",
}
FIXED = "def add(first, second):\n    return first + second\n"
PASS_TO_PASS = ["tests/test_add.py::test_zero", "tests/test_name.py::test_name", "tests/test_name.py::test_later"]
# The second id ends at the first space, as in data sets that were made from the summary of pytest.
FAIL_TO_PASS = ["tests/test_add.py::test_add[one]", "tests/test_add.py::test_add[three", "tests/test_add.py::test_expected"]
SECRET = "the-text-of-the-fix"


@dataclass(frozen=True)
class BrokenRepository:
    """A repository whose newest commit fixes the bug of its base commit.

    Args:
        base: the folder that holds `demo/fairsum`.
        base_commit: the commit with the bug.
        fix_commit: the commit that fixes it.
        fix_blob: the object with the fixed source.
    """

    base: Path
    base_commit: str
    fix_commit: str
    fix_blob: str

    @property
    def folder(self) -> Path:
        return self.base / "demo" / "fairsum"

    def row(self, **changed: Any) -> dict[str, Any]:
        """Return a row of the data set."""
        row = {
            "instance_id": "fairsum-1", "repo": "demo/fairsum", "base_commit": self.base_commit, "problem_statement": "add() returns a wrong sum.",
            "text": "The function add in src/fairsum/add.py subtracts.", "PASS_TO_PASS": PASS_TO_PASS, "FAIL_TO_PASS": FAIL_TO_PASS,
        }  # fmt: skip
        return {**row, **changed}


def git(folder: Path, *words: str) -> str:
    """Run Git without the configuration of the person who runs the tests."""
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@localhost", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@localhost"}
    env = {**os.environ, **names, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(["git", "-C", str(folder), *words], env=env, check=True, capture_output=True, text=True).stdout.strip()


def make_repository(base: Path) -> BrokenRepository:
    """Create the repository below a folder."""
    folder = base / "demo" / "fairsum"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    git(folder, "init", "-q", "--initial-branch=main")
    git(folder, "commit", "-q", "--allow-empty", "-m", "An earlier commit")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "Add the package")
    base_commit = git(folder, "rev-parse", "HEAD")
    (folder / "src" / "fairsum" / "add.py").write_text(f"# {SECRET}\n" + FIXED)
    git(folder, "commit", "-qam", "Fix add")
    fix_commit = git(folder, "rev-parse", "HEAD")
    git(folder, "tag", "v2", fix_commit)
    return BrokenRepository(base, base_commit, fix_commit, git(folder, "rev-parse", "HEAD:src/fairsum/add.py"))

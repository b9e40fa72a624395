"""What an installation holds and needs: the extras, the imports of the client, the wheel away from its source tree."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.service import running_service
from tests.support.users import ROOT, Runner

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Runner:
    """Runs things with the wheel's packages in front of those of the source tree."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    return Runner(name="wheel", python=sys.executable, cwd=tmp_path, uid=os.geteuid(), gid=os.getegid(), environ={"PYTHONPATH": str(tmp_path)})


def imports_of(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_the_client_library_needs_httpx_and_nothing_else() -> None:
    names = {name for path in (ROOT / "env_client").glob("*.py") if path.name != "demo.py" for name in imports_of(path)}

    assert names - sys.stdlib_module_names == {"httpx", "env_client"}
    assert [requirement.split(">")[0] for requirement in PROJECT["dependencies"]] == ["httpx"]


def test_the_extra_all_is_all_the_others() -> None:
    extras = PROJECT["optional-dependencies"]

    (everything,) = extras["all"]

    assert sorted(everything.partition("[")[2].rstrip("]").split(",")) == sorted(set(extras) - {"all"})


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    ours = {str(path.relative_to(ROOT)) for name in ("sandbox_server", "env_client", "environments") for path in (ROOT / name).rglob("*") if path.is_file()}
    ours = {name for name in ours if "__pycache__" not in name}

    with zipfile.ZipFile(wheel) as archive:
        missing = ours - set(archive.namelist())

    assert missing == set()


def test_the_installed_wheel_serves_away_from_the_source_tree(installed: Runner) -> None:
    where = installed.run(installed.python, "-c", "import sandbox_server, env_client; print(sandbox_server.__file__, env_client.__file__)").stdout
    assert [Path(path).is_relative_to(installed.cwd) for path in where.split()] == [True, True]

    with running_service(runner=installed) as service, service.http() as http:
        lease_id = http.post("/v1/acquire", json={}).json()["leases"][0]["lease_id"]
        answer = http.post("/v1/exec-batch", json={"calls": [{"lease_id": lease_id, "tool": "bash", "args": {"command": "echo $((6 * 7))"}}]})

    assert answer.json()["results"][0]["output"] == "42\n"

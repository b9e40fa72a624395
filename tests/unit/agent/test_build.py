"""The zipapp: the same bytes each time, runnable by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

from sandbox_server.agent import init
from sandbox_server.agent.build import build, content
from sandbox_server.agent.slots import bundle


def test_two_builds_are_the_same_byte_for_byte(tmp_path: Path) -> None:
    build(tmp_path / "a.pyz")
    other = subprocess.run(
        [sys.executable, "-m", "sandbox_server.agent.build", str(tmp_path / "b.pyz")], check=True, cwd=Path(__file__).resolve().parents[3], capture_output=True
    )

    assert other.stderr == b""
    assert (tmp_path / "a.pyz").read_bytes() == (tmp_path / "b.pyz").read_bytes() == content()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pyz", "b.pyz"]


def test_the_zipapp_has_every_module_of_the_agent_and_none_of_the_service(tmp_path: Path) -> None:
    build(tmp_path / "a.pyz")
    names = zipfile.ZipFile(tmp_path / "a.pyz").namelist()

    assert "sandbox_server/agent/init/init.py" in names
    assert all(name == "__main__.py" or name.startswith(("sandbox_server/agent/", "sandbox_server/__init__.py")) for name in names)


def test_the_zipapp_runs_alone_and_reports_a_bad_configuration(tmp_path: Path) -> None:
    build(tmp_path / "a.pyz")
    ran = subprocess.run([sys.executable, "-I", "-S", "-B", str(tmp_path / "a.pyz")], input=b'{"nonsense": 1}', capture_output=True, check=False)

    assert ran.returncode == 2
    assert json.loads(ran.stderr)["message"] == "unknown field nonsense"


def test_the_zipapp_is_a_relay_with_the_argument_connect(tmp_path: Path) -> None:
    build(tmp_path / "a.pyz")
    command = [sys.executable, "-I", "-S", "-B", str(tmp_path / "a.pyz"), "connect", str(tmp_path / "none.sock")]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)

    assert ran.returncode == 1
    assert ran.stderr.startswith(b"cannot connect to the agent at ")


def test_the_folder_of_slot_code_has_only_what_slots_run(tmp_path: Path) -> None:
    bundle.write_slot_lib(str(tmp_path / "lib"))
    agent = tmp_path / "lib" / "sandbox_server" / "agent"

    assert {path.name for path in agent.iterdir()} == {"__init__.py", "__pycache__", "init", "inslot", "template"}
    assert {path.name for path in (agent / "init").glob("*.py")} == {path.name for path in Path(init.__path__[0]).glob("*.py")}
    ran = subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-c",
            f"import sys; sys.path.insert(0, {str(tmp_path / 'lib')!r}); import sandbox_server.agent.init.init, sandbox_server.agent.inslot.child",
        ],
        check=False,
        capture_output=True,
    )
    assert ran.stderr == b""
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in (tmp_path / "lib").rglob("*"))

"""Tests of the first start of pytest in an environment: what it describes, and which settings of a repository it accepts."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from environments.swe_smith.in_slot.base import RowError, StepError
from environments.swe_smith.in_slot.finish_environment import _start_pytest

TEST = "tests/test_one.py"
#: pytest and the packages that it imports.
PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The interpreter of an environment that has nothing but pytest, in a workspace with a repository."""
    monkeypatch.setenv("SANDBOX_WORKSPACE", str(tmp_path))
    (tmp_path / "repo" / "tests").mkdir(parents=True)
    (tmp_path / "repo" / TEST).write_text("def test_one():\n    pass\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".env")], check=True)
    return str(tmp_path / ".env" / "bin" / "python")


def test_the_first_start_of_pytest(python: str, tmp_path: Path) -> None:
    with pytest.raises(StepError, match=r"(?s)the environment has no pytest that starts: .*No module named '_pytest'"):
        _start_pytest(python, False, [TEST])

    (site_packages,) = (tmp_path / ".env" / "lib").glob("python*/site-packages")
    for name in PACKAGES:  # links, so that nothing is compiled anew
        file = Path(str(importlib.import_module(name).__file__))
        source = file.parent if file.name == "__init__.py" else file
        (site_packages / source.name).symlink_to(source)
    described, options = _start_pytest(python, False, [TEST])
    assert (described[0], described[2], options) == (pytest.__version__, [], [])
    assert str(site_packages) in described[1]
    assert not any(Path(path).is_relative_to(tmp_path / "repo") for path in described[1])

    settings = tmp_path / "repo" / "pytest.ini"
    settings.write_text("[pytest]\naddopts = --option-of-a-plugin-that-is-not-there\n")
    assert _start_pytest(python, False, [TEST]) == (described, ["-o", "addopts="])
    settings.write_text("[pytest]\nminversion = 1000\n")
    with pytest.raises(RowError, match=r"(?s)pytest does not start in its environment: .*requires pytest-1000"):
        _start_pytest(python, False, [TEST])

    # A repository that is a part of pytest is imported before it.
    settings.unlink()
    (tmp_path / "repo" / "pytest.py").write_text("import pathlib\n\npathlib.Path('imported').touch()\n")
    assert _start_pytest(python, True, [TEST]) == (described, [])
    assert (tmp_path / "repo" / "imported").exists()

"""Try whether the model's version of the repository still installs: without dependencies, without an index, into a folder that is thrown away."""

import os
import shutil
import tempfile
import time
from typing import Any, Dict, Optional

from environments.swe_smith.in_slot.base import protect_from_children, run, run_step, workspace

#: Has the build backend of the project in the working folder build a wheel into a folder. pip starts two processes for that, one for the metadata alone, and
#: each imports the backend anew.
BUILD_WHEEL = """
import importlib, os, sys
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    settings = tomllib.load(file).get("build-system", {})
sys.path[:0] = [os.path.abspath(path) for path in settings.get("backend-path", ())]
module, _, attributes = settings.get("build-backend", "setuptools.build_meta:__legacy__").partition(":")
backend = importlib.import_module(module)
for name in filter(None, attributes.split(".")):
    backend = getattr(backend, name)
backend.build_wheel(sys.argv[1])
"""


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(try_install, request, nonce)


def try_install(request: Dict[str, Any]) -> Dict[str, Any]:
    """Install into a new folder.

    Args:
        request: `source` (the folder of the project), and `timeout_s`, in seconds.

    Returns:
        `installed`: whether pip succeeded, and the folder has the metadata of a project.
    """
    protect_from_children()
    folder = tempfile.mkdtemp(prefix="swe-install-")
    target = os.path.join(folder, "target")
    deadline = time.monotonic() + request["timeout_s"]
    python = os.path.join(workspace(), ".env", "bin", "python")
    env = {**os.environ, "HOME": folder, "TMPDIR": folder, "PYTHONNOUSERSITE": "1", "PIP_CONFIG_FILE": os.devnull}
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet", "--target", target]
    try:
        # A wheel that could not be built leaves it to pip, which also knows older ways to install a project.
        project = _build_wheel(python, request["source"], os.path.join(folder, "wheels"), env, request["timeout_s"]) or request["source"]
        left_s = max(1.0, deadline - time.monotonic())
        code, _ = run([python, "-I", "-m", "pip", "install", *words, project], cwd=folder, env=env, timeout_s=left_s)
        names = os.listdir(target) if os.path.isdir(target) else []
        return {"installed": code == 0 and any(name.endswith((".dist-info", ".egg-info")) for name in names)}
    except OSError:  # what the project ran while it was installed has removed the folder
        return {"installed": False}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _build_wheel(python: str, source: str, folder: str, env: Dict[str, str], timeout_s: float) -> Optional[str]:
    """Build a wheel of a project into a new folder; return its path, or None if the project has no `pyproject.toml`, or its build failed."""
    if not os.path.isfile(os.path.join(source, "pyproject.toml")):
        return None
    os.mkdir(folder)
    code, _ = run([python, "-I", "-c", BUILD_WHEEL, folder], cwd=source, env=env, timeout_s=timeout_s)
    wheels = [name for name in os.listdir(folder) if name.endswith(".whl")]
    return os.path.join(folder, wheels[0]) if code == 0 and len(wheels) == 1 else None

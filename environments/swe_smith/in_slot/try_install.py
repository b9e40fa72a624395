"""Try whether the model's version of the repository still installs: without dependencies, without an index, into a folder that is thrown away."""

import os
import shutil
import tempfile
from typing import Any, Dict

from environments.swe_smith.in_slot.base import protect_from_children, run, run_step, workspace


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
    python = os.path.join(workspace(), ".env", "bin", "python")
    env = {**os.environ, "HOME": folder, "TMPDIR": folder, "PYTHONNOUSERSITE": "1", "PIP_CONFIG_FILE": os.devnull}
    words = ["--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check", "--quiet", "--target", target]
    try:
        code, _ = run([python, "-I", "-m", "pip", "install", *words, request["source"]], cwd=folder, env=env, timeout_s=request["timeout_s"])
        names = os.listdir(target) if os.path.isdir(target) else []
        return {"installed": code == 0 and any(name.endswith((".dist-info", ".egg-info")) for name in names)}
    except OSError:  # what the project ran while it was installed has removed the folder
        return {"installed": False}
    finally:
        shutil.rmtree(folder, ignore_errors=True)

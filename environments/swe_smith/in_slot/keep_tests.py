"""Keep what decides about a rollout, before the model starts: the tests, every conftest.py, the settings of pytest, and the Git folder."""

import os
import shutil
from typing import Any, Dict, List, Set

from environments.swe_smith.in_slot.base import SETTINGS_NAMES, Git, repository, run_step, tracked_files, workspace

#: Folders with these names hold tests and what tests read. The whole folder is kept.
TEST_FOLDERS = ("test", "tests", "testing")


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(keep_tests, request, nonce)


def keep_tests(request: Dict[str, Any]) -> Dict[str, Any]:
    """Copy what is kept into `/workspace/.tests`.

    Args:
        request: `tests`: the files of the tests that are scored.

    Returns:
        `folders`: the paths of folders that are kept whole, of which a model's version is ignored; `file_count`.
    """
    with Git() as git:
        tracked = tracked_files(git)
    folders = sorted({folder for path in request["tests"] for folder in [_test_folder(path)] if folder})
    kept = _kept_files(tracked, set(request["tests"]), folders)
    target = os.path.join(workspace(), ".tests")
    shutil.rmtree(target, ignore_errors=True)
    # Copies, not hard links: what is kept must not change with the repository.
    shutil.copytree(os.path.join(repository(), ".git"), os.path.join(target, "git"), symlinks=True)
    for path in kept:
        destination = os.path.join(target, "files", path)
        os.makedirs(os.path.dirname(destination), exist_ok=True)
        shutil.copy2(os.path.join(repository(), path), destination, follow_symlinks=False)
    return {"folders": folders, "file_count": len(kept)}


def _test_folder(path: str) -> str:
    """Return the outermost folder of tests on a path; empty if there is none."""
    parts = path.split("/")[:-1]
    for number, part in enumerate(parts):
        if part in TEST_FOLDERS:
            return "/".join(parts[: number + 1])
    return ""


def _kept_files(tracked: List[str], tests: Set[str], folders: List[str]) -> List[str]:
    prefixes = tuple(folder + "/" for folder in folders)
    names = ("conftest.py", *SETTINGS_NAMES)
    chosen = [path for path in tracked if path in tests or path.startswith(prefixes) or path.rpartition("/")[2] in names]
    return [path for path in chosen if os.path.lexists(os.path.join(repository(), path)) and not os.path.isdir(os.path.join(repository(), path))]

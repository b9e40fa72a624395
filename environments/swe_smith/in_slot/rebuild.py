"""Build the repository anew for scoring: what was kept, and of the model's version everything that cannot decide how tests run.

Everything is written into new folders, so a link that a model has put somewhere leads nothing astray. Git is not used: the model had its `.git`.
"""

import os
import shutil
import stat
from typing import Any, Dict, Iterator, List, Tuple

from environments.swe_smith.in_slot.base import SETTINGS_NAMES, run_step, workspace

#: What is not taken from the model's version of the repository, wherever it is.
IGNORED_NAMES = frozenset(("conftest.py", "__pycache__", ".git", ".pytest_cache", *SETTINGS_NAMES))
#: How many files and folders of the model's version are looked at.
MAX_ENTRIES = 500_000
#: How deep folders may be nested.
MAX_DEPTH = 100


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(rebuild, request, nonce)


def rebuild(request: Dict[str, Any]) -> Dict[str, Any]:
    """Move everything in the workspace aside, and build the repository anew.

    Args:
        request: `name` (a new name, for what is moved aside), and `folders`: the folders that are kept whole.

    Returns:
        `model_version`: the folder of the model's version of the repository; `entry_count`: how many files of it were taken.
    """
    top = workspace()
    aside = os.path.join(top, "." + request["name"])
    os.mkdir(aside, 0o700)
    for name in os.listdir(top):
        if name not in (".env", ".tests", os.path.basename(aside)):
            _move(os.path.join(top, name), os.path.join(aside, name))
    repo, model = os.path.join(top, "repo"), os.path.join(aside, "repo")
    kept = os.path.join(top, ".tests", "files")
    if os.path.isdir(kept):
        shutil.copytree(kept, repo, symlinks=True)
    else:
        os.mkdir(repo)
    taken = 0
    if os.path.isdir(model) and not os.path.islink(model):
        taken = _take(model, repo, frozenset(request["folders"]))
    shutil.copytree(os.path.join(top, ".tests", "git"), os.path.join(repo, ".git"), symlinks=True)
    return {"model_version": model, "entry_count": taken}


def _move(source: str, target: str) -> None:
    try:
        os.rename(source, target)
    except PermissionError:  # a folder that its owner may not write cannot be moved to another parent
        os.chmod(source, 0o700)
        os.rename(source, target)


def _take(model: str, repo: str, folders: "frozenset[str]") -> int:
    """Take the files of the model's version that are not kept."""
    taken = 0
    pending: List[Tuple[str, int]] = [("", 0)]
    seen = 0
    while pending:
        inside, depth = pending.pop()
        for entry in _entries(os.path.join(model, inside)):
            seen += 1
            path = os.path.join(inside, entry.name)
            if seen > MAX_ENTRIES:
                return taken
            if entry.name in IGNORED_NAMES or path in folders:
                continue
            taken += _take_entry(entry, path, os.path.join(repo, path))
            if entry.is_dir(follow_symlinks=False) and depth < MAX_DEPTH and os.path.isdir(os.path.join(repo, path)):
                pending.append((path, depth + 1))
    return taken


def _entries(folder: str) -> Iterator["os.DirEntry[str]"]:
    try:
        os.chmod(folder, 0o700)
        with os.scandir(folder) as entries:
            yield from list(entries)
    except OSError:  # a path that is too long, or a folder that another user made
        return


def _take_entry(entry: "os.DirEntry[str]", path: str, target: str) -> int:
    """Take one entry; return 1 if there is something new. What is kept stays: nothing is written over it."""
    try:
        if os.path.lexists(target):
            return 0
        mode = entry.stat(follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            os.mkdir(target)
        elif stat.S_ISLNK(mode):
            os.symlink(os.readlink(entry.path), target)
        elif stat.S_ISREG(mode):
            _link_or_copy(entry.path, target)
        else:
            return 0  # pipes, sockets and devices are no part of a repository
    except OSError:  # for example a name that is too long; the tests show whether the file matters
        return 0
    return 1


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)

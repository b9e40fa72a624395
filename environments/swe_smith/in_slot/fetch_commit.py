"""Get one commit as a pack: from the cache of the sandbox, from an upload, or from a Git server."""

import fcntl
import os
import shutil
import tempfile
from typing import Any, Dict

from environments.swe_smith.in_slot.base import Git, RowError, StepError, cache_folder, last_lines, run_step, workspace, write_commit_pack

#: What Git says when a server does not send single commits. It also says `not our ref` for a commit that does not exist.
REFUSES_SINGLE_COMMITS = (
    "not our ref", "unadvertised object", "dumb http transport", "does not support shallow", "couldn't find remote ref", "protocol error: bad pack header",
)  # fmt: skip
#: What Git says when there is no such repository. A server that does not tell asks for a password.
NO_REPOSITORY = ("not found", "could not read username", "does not exist", "does not appear to be a git repository", "authentication failed", "repository not exported")


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(fetch_commit, request, nonce)


def fetch_commit(request: Dict[str, Any]) -> Dict[str, Any]:
    """Put the pack of a commit into the cache, unless it is there, and say where it is.

    Args:
        request: `key` (names the repository in the cache), `commit`, `repo`, and one of `url` (fetch it), `upload` (a pack in the workspace: move it into the
            cache), or neither (only look).

    Raises:
        RowError: there is no such repository or commit.
        StepError: it could not be fetched.
    """
    folder = os.path.join(cache_folder() or os.path.join(workspace(), ".fetched"), request["key"])
    os.makedirs(folder, exist_ok=True)
    pack = os.path.join(folder, request["commit"] + ".pack")
    with open(os.path.join(folder, "lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other slots of the sandbox wait here, and then find the pack
        if os.path.exists(pack):
            return {"pack": pack, "fetched": False}
        if request.get("upload"):
            shutil.copyfile(os.path.join(workspace(), request["upload"]), pack + ".part")
            os.rename(pack + ".part", pack)
            os.unlink(os.path.join(workspace(), request["upload"]))
        elif request.get("url"):
            with Git() as git:
                _fetch(git, request, folder, pack)
        else:
            return {"pack": None, "fetched": False}
    return {"pack": pack, "fetched": True}


def _fetch(git: Git, request: Dict[str, Any], folder: str, pack: str) -> None:
    single = tempfile.mkdtemp(prefix="swe-fetch-")
    try:
        git.check("init", "-q", "--bare", "--template=", single)
        code, output = git.run("fetch", "-q", "--depth", "1", "--no-tags", "--no-write-fetch-head", request["url"], request["commit"], cwd=single)
        if code == 0:
            write_commit_pack(git, single, request["commit"], pack)
            return
    finally:
        shutil.rmtree(single, ignore_errors=True)
    if any(text in output.lower() for text in REFUSES_SINGLE_COMMITS):
        _fetch_all(git, request, os.path.join(folder, "full.git"), pack)
    else:
        _raise_fetch_error(request, output)


def _fetch_all(git: Git, request: Dict[str, Any], full: str, pack: str) -> None:
    """Fetch all branches and tags into the cache, and take the one commit out."""
    if not os.path.exists(os.path.join(full, "HEAD")):
        git.check("init", "-q", "--bare", "--template=", full)
    if git.run("cat-file", "-e", request["commit"] + "^{commit}", cwd=full)[0] != 0:
        code, output = git.run("fetch", "-q", "--no-write-fetch-head", request["url"], "+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*", cwd=full)
        if code != 0:
            _raise_fetch_error(request, output)
    if git.run("cat-file", "-e", request["commit"] + "^{commit}", cwd=full)[0] != 0:
        raise RowError("the repository %s has no commit %s" % (request["repo"], request["commit"]))
    write_commit_pack(git, full, request["commit"], pack)


def _raise_fetch_error(request: Dict[str, Any], output: str) -> None:
    if any(text in output.lower() for text in NO_REPOSITORY):
        raise RowError("the repository %s cannot be found: %s" % (request["repo"], last_lines(output)))
    raise StepError("the commit %s of %s could not be fetched: %s" % (request["commit"], request["repo"], last_lines(output)))

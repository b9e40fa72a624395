"""Make the repository of the slot from the pack of one commit: no remote, no reflog, no alternate, no other ref, no other commit."""

import os
import shutil
from typing import Any, Dict

from environments.swe_smith.in_slot.base import Git, RowError, StepError, repository, run_step, workspace

#: What a test run, or an editable install, leaves in a repository. Git shall not show it to the model as a change.
EXCLUDED = "__pycache__/\n*.egg-info/\n.pytest_cache/\n"


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(check_out, request, nonce)


def check_out(request: Dict[str, Any]) -> Dict[str, Any]:
    """Unpack a commit and check it out.

    Args:
        request: `pack`, `commit`, and `tests`: the files that must be there.

    Raises:
        RowError: a file of the tests is not in the commit.
        StepError: Git failed.
    """
    repo, commit = repository(), request["commit"]
    with Git() as git:
        git.check("init", "-q", "--template=", repo)
        with open(request["pack"], "rb") as pack:
            git.check("index-pack", "--stdin", cwd=repo, data=pack.read())
        with open(os.path.join(repo, ".git", "shallow"), "w") as shallow:
            shallow.write(commit + "\n")
        git.check("cat-file", "-e", commit + "^{commit}", cwd=repo)
        git.check("symbolic-ref", "HEAD", "refs/heads/main", cwd=repo)
        git.check("update-ref", "refs/heads/main", commit, cwd=repo)
        git.check("read-tree", "--reset", "-u", "HEAD", cwd=repo)
        git.check("config", "user.name", "agent", cwd=repo)
        git.check("config", "user.email", "agent@localhost", cwd=repo)
        os.makedirs(os.path.join(repo, ".git", "info"), exist_ok=True)
        with open(os.path.join(repo, ".git", "info", "exclude"), "w") as exclude:
            exclude.write(EXCLUDED)
        if git.check("status", "--porcelain", cwd=repo).strip():
            raise StepError("the repository differs from its commit %s after the checkout" % commit)
    shutil.rmtree(os.path.join(workspace(), ".fetched"), ignore_errors=True)
    missing = [path for path in request["tests"] if not os.path.isfile(os.path.join(repo, path))]
    if missing:
        raise RowError("the commit %s has no file %s, which its tests are in" % (commit, ", ".join(missing[:5])))
    return {"repository": repo}

"""List the files of the repository with their digests, in a slot in which no model has been."""

import hashlib
import json
import os
import stat
from typing import Any, Dict

from environments.swe_smith.in_slot.base import repository, run_step, workspace


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(tree_digests, request, nonce)


def tree_digests(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write a JSON object with the digest of each regular file, by its path, to a file.

    Args:
        request: `path`: where to write, relative to the workspace.
    """
    digests = {}
    for folder, folders, files in os.walk(repository()):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__")]
        for name in files:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    digests[os.path.relpath(path, repository())] = "%s-%o" % (hashlib.sha256(file.read()).hexdigest(), status.st_mode & 0o111)
            elif stat.S_ISLNK(status.st_mode):
                digests[os.path.relpath(path, repository())] = "link"
    with open(os.path.join(workspace(), request["path"]), "w") as target:
        json.dump(digests, target)
    return {"file_count": len(digests)}

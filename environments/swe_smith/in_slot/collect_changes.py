"""Pack what a model has changed in the repository, in the slot of the model. Links are not followed, and nothing of the repository is run."""

import hashlib
import io
import json
import os
import stat
import tarfile
from typing import Any, Dict, Iterator, List, Tuple

from environments.swe_smith.in_slot.base import repository, run_step

#: What is never taken: it decides how tests run, or is made anew.
IGNORED_NAMES = frozenset((".git", "__pycache__", ".pytest_cache"))
MAX_ENTRIES = 500_000
MAX_DEPTH = 100


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(collect_changes, request, nonce)


def collect_changes(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write the files that differ from the digests of the commit into an archive, and the list of those that are gone.

    Args:
        request: `digests` and `target`: the absolute paths of the digests and of the archive; `max_bytes`: the most that the changed files may have.

    Returns:
        `size_bytes` of the archive; null if there is more than `max_bytes`.
    """
    with open(request["digests"]) as file:
        digests = json.load(file)
    seen = set()
    left_bytes = request["max_bytes"]
    # The name is new; `x` refuses a link that was put there. A process of the model may change the archive, which is checked where it is applied.
    with open(request["target"], "xb") as target, tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as archive:
        for path, inside, status in _files():
            seen.add(inside)
            if stat.S_ISLNK(status.st_mode):
                continue
            # A file that is too large to be taken is not read either, whatever its digest is.
            digest = _digest(path, status.st_size) if inside in digests and status.st_size <= request["max_bytes"] else ""
            if digests.get(inside) == "%s-%o" % (digest, status.st_mode & 0o111):
                continue
            left_bytes -= status.st_size
            if left_bytes < 0:
                return {"size_bytes": None}
            _add(archive, path, inside, status)
        gone = json.dumps(sorted(set(digests) - seen)).encode()
        member = tarfile.TarInfo("gone.json")
        member.size = len(gone)
        archive.addfile(member, io.BytesIO(gone))
    return {"size_bytes": os.path.getsize(request["target"])}


def _digest(path: str, size_bytes: int) -> str:
    """Return the digest of a file of the given size; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(size_bytes)).hexdigest()
    except OSError:
        return ""


def _add(archive: tarfile.TarFile, path: str, inside: str, status: os.stat_result) -> None:
    try:
        with open(path, "rb") as file:
            content = file.read(status.st_size)
    except OSError:  # the model has made it unreadable
        return
    member = tarfile.TarInfo(os.path.join("changed", inside))
    member.size, member.mode = len(content), 0o755 if status.st_mode & 0o111 else 0o644
    archive.addfile(member, io.BytesIO(content))


def _files() -> Iterator[Tuple[str, str, os.stat_result]]:
    """Yield the regular files and links of the repository: path, path inside the repository, status."""
    pending: List[Tuple[str, int]] = [("", 0)]
    seen = 0
    while pending and not os.path.islink(repository()):
        inside, depth = pending.pop()
        for name in _names(os.path.join(repository(), inside)):
            seen += 1
            if seen > MAX_ENTRIES:
                return
            if name in IGNORED_NAMES:
                continue
            path = os.path.join(repository(), inside, name)
            try:
                status = os.lstat(path)
            except OSError:  # for example a path that is too long
                continue
            if stat.S_ISDIR(status.st_mode):
                if depth < MAX_DEPTH:
                    pending.append((os.path.join(inside, name), depth + 1))
            elif stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
                yield path, os.path.join(inside, name), status


def _names(folder: str) -> List[str]:
    try:
        os.chmod(folder, 0o700)
        return os.listdir(folder)
    except OSError:
        return []

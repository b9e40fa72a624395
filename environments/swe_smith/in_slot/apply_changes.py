"""Apply a model's changes to the repository of a slot in which no model has been. The archive was made in the model's slot and is not trusted."""

import json
import os
import stat
import tarfile
from typing import Any, Dict

from environments.swe_smith.in_slot.base import repository, run_step, workspace

MAX_MEMBERS = 500_000
MAX_GONE_BYTES = 64 << 20


def main(request: Dict[str, Any], nonce: str) -> None:
    """Run the step."""
    run_step(apply_changes, request, nonce)


def apply_changes(request: Dict[str, Any]) -> Dict[str, Any]:
    """Write the changed files, and remove those that are gone.

    Args:
        request: `archive`: its path, relative to the workspace; `max_bytes`: the most that may be written.

    Returns:
        `changed`, `gone`: how many files were written and removed; `refused`: how many members could not be applied, or must not be.
    """
    counts = {"changed": 0, "gone": 0, "refused": 0}
    left_bytes, has_gone = request["max_bytes"], False
    path = os.path.join(workspace(), request["archive"])
    try:
        with tarfile.open(path, "r|gz") as archive:
            for number, member in enumerate(archive):
                if number > MAX_MEMBERS:
                    break
                if member.name == "gone.json" and member.isreg() and member.size <= MAX_GONE_BYTES and not has_gone:
                    has_gone = True
                    _remove(json.load(archive.extractfile(member)), counts)  # type: ignore[arg-type]
                    continue
                left_bytes -= member.size
                if left_bytes < 0:
                    break
                counts["changed" if _write(archive, member) else "refused"] += 1
    except Exception:  # not an archive that `collect_changes` has written: what comes before its error is applied
        counts["refused"] += 1
    os.unlink(path)
    return dict(counts)


def _target(inside: str) -> str:
    """Return the path of a file in the repository; empty if it is not one that may be written."""
    parts = inside.split("/")
    if not all(parts) or any(part in (".", "..", ".git") or "\0" in part for part in parts):
        return ""
    folder = repository()
    for part in parts[:-1]:
        folder = os.path.join(folder, part)
        if os.path.lexists(folder) and not stat.S_ISDIR(os.lstat(folder).st_mode):
            return ""
    return os.path.join(folder, parts[-1])


def _write(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bool:
    target = _target(member.name[len("changed/") :]) if member.name.startswith("changed/") else ""
    content = archive.extractfile(member) if target and member.isreg() else None
    if content is None or (os.path.isdir(target) and not os.path.islink(target)):
        return False
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(target):
        os.unlink(target)
    with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o755 if member.mode & 0o100 else 0o644), "wb") as file:
        while True:
            piece = content.read(1 << 20)
            if not piece:
                return True
            file.write(piece)


def _remove(gone: Any, counts: Dict[str, int]) -> None:
    for inside in gone if isinstance(gone, list) else []:
        target = _target(inside) if isinstance(inside, str) else ""
        if target and os.path.lexists(target) and not stat.S_ISDIR(os.lstat(target).st_mode):
            os.unlink(target)
            counts["gone"] += 1

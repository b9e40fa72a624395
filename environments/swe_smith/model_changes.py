"""Brings what a model has changed from its slot into another one. The archive is made in the model's slot and is not trusted: it is bounded, and checked."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from env_client import FileError, FileNotFound
from environments.rollouts.exec_tool import ExecTool
from environments.swe_smith.slot_steps import StepEnded, StepFailed, run_step, slot_files

#: The most that the changed files may have together, in bytes.
MAX_CHANGED_BYTES = 256 << 20
#: The most that the archive of the changed files may have, in bytes.
MAX_ARCHIVE_BYTES = 64 << 20
TIMEOUT_S = 300.0


class ChangesUnusable(Exception):
    """The changes of the model are not brought into another slot, because they are too large, or because something in its slot prevents it."""


async def bring_changes(model_slot: ExecTool, fresh_slot: ExecTool, model_python: str, fresh_python: str) -> dict[str, int]:
    """Apply the changes that were made in the repository of one slot to the repository of another.

    Args:
        model_slot: the slot of the model. Its processes may still run: whatever they do, the archive is checked.
        fresh_slot: a slot that was set up for the same row.
        model_python: the interpreter in the model's slot.
        fresh_python: the interpreter in the other slot.

    Returns:
        How many files were `changed` and `gone`, and how many were `refused`.

    Raises:
        ChangesUnusable: there is more than `MAX_CHANGED_BYTES` or `MAX_ARCHIVE_BYTES`, or the model has prevented it.
        StepFailed: a step failed.
        RolloutFault: a slot was lost.
    """
    name = f".changes-{secrets.token_hex(8)}"
    top = model_slot.lease.info.workspace
    try:
        with tempfile.TemporaryDirectory(prefix="swe-changes-") as folder:
            digests, archive = Path(folder) / "digests.json", Path(folder) / "changes.tar.gz"
            await run_step(fresh_slot, "tree_digests", {"path": f"{name}.json"}, timeout_s=TIMEOUT_S, python=fresh_python)
            async with slot_files():
                await fresh_slot.lease.get_file_to(f"{name}.json", digests)
            async with _model_files():
                await model_slot.lease.put_file(f"{name}.json", digests)
            request = {"digests": f"{top}/{name}.json", "target": f"{top}/{name}.tar.gz", "max_bytes": MAX_CHANGED_BYTES}
            collected = await run_step(model_slot, "collect_changes", request, timeout_s=TIMEOUT_S, python=model_python, runs_model_code=True)
            if collected["size_bytes"] is None or collected["size_bytes"] > MAX_ARCHIVE_BYTES:
                raise ChangesUnusable(f"the model has changed more than {MAX_CHANGED_BYTES} bytes")
            async with _model_files():
                await _download(model_slot, f"{name}.tar.gz", archive)
            async with slot_files():
                await fresh_slot.lease.put_file(f"{name}.tar.gz", archive)
            request = {"archive": f"{name}.tar.gz", "max_bytes": MAX_CHANGED_BYTES}
            return await run_step(fresh_slot, "apply_changes", request, timeout_s=TIMEOUT_S, python=fresh_python)
    except StepEnded as ended:
        if not ended.is_by_model:
            raise StepFailed(f"the changes of the model could not be brought into another slot: {ended}") from ended
        raise ChangesUnusable(f"the changes of the model could not be brought into another slot: {ended}") from ended


@asynccontextmanager
async def _model_files() -> AsyncIterator[None]:
    """Copy a file into or out of the model's slot. A file that is not there, or cannot be written, is the model's doing: its processes may still run.

    Raises:
        ChangesUnusable: the model has prevented the copy.
        RolloutFault: the copy failed otherwise.
    """
    async with slot_files():
        try:
            yield
        except (FileError, FileNotFound) as error:
            raise ChangesUnusable(f"the changes of the model cannot be read: {error.detail}") from error


async def _download(slot: ExecTool, path: str, target: Path) -> None:
    size_bytes = 0
    with target.open("wb") as file:
        async for chunk in slot.lease.stream_file(path):
            size_bytes += len(chunk)
            if size_bytes > MAX_ARCHIVE_BYTES:
                raise ChangesUnusable(f"the archive of the changes has more than {MAX_ARCHIVE_BYTES} bytes")
            file.write(chunk)

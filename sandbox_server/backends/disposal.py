"""Folders of sandboxes that are gone: moved aside at once, deleted by a process of its own, so that nobody waits for a million files, nor a stop."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

from sandbox_server.agent.kernel import trash
from sandbox_server.backends.processes import ended_within, spawn

DELETING_AT_MOST_S = 3600.0

_ends: set[asyncio.Task[bool]] = set()


async def dispose(folders: Iterable[str], aside: Path, within_s: float) -> None:
    """Move folders aside and have them deleted.

    Args:
        folders: what is to go; what is not there is gone already. On another file system than `aside` it is deleted where it is.
        aside: a folder for what is being deleted; made if it is not there.
        within_s: how long to wait for the end of the deleting, in seconds. It goes on without us.

    Raises:
        OSError: a folder could not be moved aside.
    """
    doomed = _move_all_aside(folders, aside)
    if not doomed:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        pid, started = spawn([sys.executable, "-I", "-S", "-B", trash.__file__, *doomed], {}, null, null)
    finally:
        os.close(null)
    # Waited for to its end, so that it is reaped; the caller waits no longer than it likes.
    end = asyncio.create_task(ended_within(pid, started, DELETING_AT_MOST_S))
    _ends.add(end)
    end.add_done_callback(_ends.discard)
    await asyncio.wait({end}, timeout=within_s)


async def sweep(aside: Path, within_s: float) -> None:
    """Delete what an earlier life moved aside and did not come to delete."""
    await dispose(_left_in(aside), aside, within_s)


def _left_in(aside: Path) -> list[str]:
    return [str(path) for path in aside.iterdir()] if aside.is_dir() else []


def _move_all_aside(folders: Iterable[str], aside: Path) -> list[str]:
    moved = []
    for folder in folders:
        path = _move_aside(folder, aside)
        if path is not None:
            moved.append(path)
    return moved


def _move_aside(folder: str, aside: Path) -> str | None:
    target = aside / f"{Path(folder).name}.{secrets.token_hex(4)}"
    if not os.path.lexists(folder):
        return None
    try:
        aside.mkdir(mode=0o700, exist_ok=True)
        os.rename(folder, target)
    except OSError:
        return folder  # on another file system, or on a disk too full for a name: deleted where it is
    return str(target)

"""Deletes the folders of sandboxes that are gone.

A folder is moved aside at once and deleted by a separate process, so that neither a caller nor the stop of the service waits until a million files
are deleted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path

from sandbox_server.agent.kernel import trash
from sandbox_server.backends.processes import spawn, wait_for_end

#: How long the service waits for the end of a deleting process in order to reap it, in seconds.
REAP_WITHIN_S = 3600.0

_waiting_tasks: set[asyncio.Task[bool]] = set()


async def delete_folders(folders: Iterable[str], aside: Path, within_s: float) -> None:
    """Move folders aside, and start a process that deletes them.

    Args:
        folders: the folders. Those that do not exist are skipped. A folder on another file system than `aside` is deleted where it is.
        aside: the folder that they are moved to. It is created if it does not exist.
        within_s: how long to wait until they are deleted, in seconds. The deleting goes on after that.

    Raises:
        OSError: the deleting process could not be started.
    """
    folders_to_delete = _move_all_aside(folders, aside)
    if not folders_to_delete:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        pid, started = spawn([sys.executable, "-I", "-S", "-B", trash.__file__, *folders_to_delete], {}, null, null)
    finally:
        os.close(null)
    # A task of its own waits for the end of the process and reaps it. The caller waits for at most `within_s`.
    end = asyncio.create_task(wait_for_end(pid, started, REAP_WITHIN_S))
    _waiting_tasks.add(end)
    end.add_done_callback(_waiting_tasks.discard)
    await asyncio.wait({end}, timeout=within_s)


async def delete_leftovers(aside: Path, within_s: float) -> None:
    """Delete the folders that an earlier process of the service has moved aside and has not deleted.

    Args:
        aside: the folder that they were moved to.
        within_s: how long to wait until they are deleted, in seconds.
    """
    await delete_folders(_left_in(aside), aside, within_s)


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
        return folder  # it is on another file system, or the disk is too full for a new name: it is deleted where it is
    return str(target)

"""Finds what is left of sandboxes after the service has destroyed them and stopped."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

TIMEOUT_S = 10.0
POLL_INTERVAL_S = 0.1
CGROUPS = Path("/sys/fs/cgroup")
# The agent's own groups in hierarchies where its sandbox has none carry its pid.
OF_AN_AGENT = re.compile(r"sandbox-pool-(\d+)-[0-9a-f]+")


async def leaks(state_dir: Path, seen: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return what is left. It is looked for until nothing is left or `TIMEOUT_S` have passed, because files are deleted in the background.

    Args:
        state_dir: the state folder of the service.
        seen: the records of all sandboxes of the run, by sandbox id.
    """
    kinds: tuple[Callable[[], Iterator[str]], ...] = (
        lambda: processes({str(state_dir), *seen}),
        lambda: groups(set(seen), {data["pid"] for data in seen.values() if "pid" in data}),
        lambda: folders(state_dir, seen),
    )
    left: list[str] = []
    for _ in range(round(TIMEOUT_S / POLL_INTERVAL_S)):
        left = [leak for kind in kinds for leak in kind()]
        if not left:
            break
        await asyncio.sleep(POLL_INTERVAL_S)
    return left


def processes(names: Collection[str]) -> Iterator[str]:
    """Yield the processes that have one of these names in their arguments, mounts, groups or environment."""
    wanted = [name.encode() for name in names]
    for folder in Path("/proc").glob("[0-9]*"):
        if folder.name == str(os.getpid()):
            continue
        text = b"\0".join(_read(folder / part) for part in ("cmdline", "mountinfo", "cgroup", "environ"))
        # What has ended and is only not reaped yet by this machine's init has no arguments and no mounts.
        name = next((name for name in wanted if name in text), None)
        if name is not None and b"\nState:\tZ" not in _read(folder / "status") and not _is_ours(name, text):
            yield f"process {folder.name} of {name.decode()}: {_read(folder / 'cmdline').replace(bytes(1), b' ').decode(errors='replace')[:200]}"


def _is_ours(name: bytes, text: bytes) -> bool:
    """Return whether the name is only found in the mount of the harness's disk, which every process of this machine sees."""
    mentions = [line for line in text.replace(b"\0", b"\n").split(b"\n") if name in line]
    return all(b"sandbox-pool-faults" in line and b" / " + name in line for line in mentions)


def groups(sandbox_ids: Collection[str], agent_pids: Collection[int]) -> Iterator[str]:
    """Yield the control groups of these sandboxes and agents."""
    for folder, below, _ in os.walk(CGROUPS):
        for name in below:
            agent = OF_AN_AGENT.fullmatch(name)
            if any(sandbox_id in name for sandbox_id in sandbox_ids) or (agent is not None and int(agent[1]) in agent_pids):
                yield f"control group {os.path.join(folder, name)}"


def folders(state_dir: Path, seen: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the folders of these sandboxes."""
    for parent in ("sandboxes", "trash"):
        for path in (state_dir / parent).glob("*"):
            yield f"folder {path}"
    for data in seen.values():
        for name in ("workspaces", "socket_dir"):
            if name in data and os.path.lexists(data[name]):
                yield f"folder {data[name]}"


def _read(path: Path) -> bytes:
    # A process that is just ending answers EINVAL for its mounts.
    with suppress(OSError):
        return path.read_bytes()
    return b""

"""Control groups for whole sandboxes, on machines where this process may make them.

Processes that are left in a sandbox when its agent has ended are killed by one write to its group.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from sandbox_server.agent.kernel.memory_groups import SLOTS_GROUP
from sandbox_server.backends.processes import start_time

GROUP_PREFIX = "sandbox-pool-"
#: How long killed processes may take to end, in seconds.
EMPTY_WITHIN_S = 5.0
POLL_INTERVAL_S = 0.005
#: An empty group that is younger than this is not removed: it may have been made for a process that has not joined it yet.
STALE_S = 60.0


def own_group() -> Path | None:
    """The folder of the cgroup v2 group that this process is in; None if there is none."""
    mount = next((line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line), None)
    path = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None)
    return Path(mount + path) if mount is not None and path is not None else None


def make_group(name: str) -> Path | None:
    """Make a group in the group that this process is in.

    Returns:
        The group's folder; None if the machine has no cgroup v2, or this process may not make groups.
    """
    parent = own_group()
    if parent is None:
        return None
    group = parent / name
    try:
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").read_text()
    except OSError:
        return None
    return group


def join_group(group: Path, pid: int) -> bool:
    """Move a process into a group.

    Returns:
        Whether it was moved.
    """
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def kill_group(group: Path) -> None:
    """Kill every process in a group and the groups below it, wait until they have ended, and remove the groups. Blocks: run it in a thread.

    Raises:
        OSError: a process has not ended within `EMPTY_WITHIN_S`.
    """
    if not group.exists():
        return
    until = time.monotonic() + EMPTY_WITHIN_S
    while _populated(group):
        _kill_all(group)
        if time.monotonic() > until:
            raise OSError(f"processes in {group} have not ended within {EMPTY_WITHIN_S:g} s")
        time.sleep(POLL_INTERVAL_S)
    _remove(group)


def remove_stale_groups(prefix: str) -> None:
    """Remove groups that a killed service has left: those that have no process and are older than `STALE_S`. Blocks.

    Args:
        prefix: what the names of the groups begin with.
    """
    parent = own_group()
    for group in parent.glob(f"{prefix}s-*") if parent is not None else ():
        # Another service of this machine may be removing the group as well, or this process may not remove it.
        with suppress(OSError):
            if time.time() - group.stat().st_mtime > STALE_S and not _populated(group):
                _remove(group)


def remove_groups_of(agent_pid: int) -> None:
    """Remove the groups that an agent has made outside of the group of its sandbox. An agent that was killed could not remove them. Blocks.

    Args:
        agent_pid: the process id of the agent. Nothing is removed while a process has this id.

    Raises:
        OSError: a process in one of the groups has not ended within `EMPTY_WITHIN_S`.
    """
    if start_time(agent_pid) is not None:
        return  # another process has this id now
    until = time.monotonic() + EMPTY_WITHIN_S
    while left := [group for parent in group_parents() for group in parent.glob(f"{GROUP_PREFIX}{agent_pid}-*") if _remove_if_own(group)]:
        if time.monotonic() > until:
            raise OSError(f"processes in {left[0]} have not ended within {EMPTY_WITHIN_S:g} s")
        time.sleep(POLL_INTERVAL_S)


def _remove_if_own(group: Path) -> bool:
    """Try to remove a group, if it belongs to the user of this process.

    Returns:
        Whether it belongs to the user and could not be removed.
    """
    with suppress(FileNotFoundError):
        if group.stat().st_uid != os.geteuid():
            return False
        with suppress(OSError):  # it still has processes
            _remove(group)
        return group.exists()
    return False


def group_parents() -> set[Path]:
    """The folders in which an agent on this machine may have made its own groups.

    These are the group of this process and the groups above it, and the top of each mounted hierarchy, because the group of this process may not be
    visible in a container.
    """
    paths = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    parents = set()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        kind, _, options = right.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            mount = Path(left.split(" ")[4])
            own = {Path(f"{mount}{paths[name]}") for name in (options.split(",") if kind == "cgroup" else [""]) if name in paths}
            parents |= {mount} | own | {folder / SLOTS_GROUP for path in own for folder in (path, *path.parents) if folder.is_relative_to(mount)}
    return {parent for parent in parents if parent.is_dir()}


def _remove(group: Path) -> None:
    for folder, _, _ in os.walk(group, topdown=False):
        with suppress(FileNotFoundError):
            os.rmdir(folder)


def _populated(group: Path) -> bool:
    return "populated 1" in (group / "cgroup.events").read_text()


def _kill_all(group: Path) -> None:
    with suppress(FileNotFoundError):
        (group / "cgroup.kill").write_text("1")
        return
    for folder, _, _ in os.walk(group):  # a kernel before 5.14
        for pid in Path(folder, "cgroup.procs").read_text().split():
            with suppress(ProcessLookupError):
                os.kill(int(pid), 9)

"""A control group for a whole sandbox, where this machine lets us make one: what is left in it when its agent is dead dies with one write."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from sandbox_server.agent.kernel.memory_groups import SLOTS_GROUP
from sandbox_server.backends.processes import start_time

GROUP_PREFIX = "sandbox-pool-"
EMPTY_WITHIN_S = 5.0
LOOK_EVERY_S = 0.005
#: A group that is just being made holds nobody either.
STALE_S = 60.0


def own_group() -> Path | None:
    """The cgroup v2 folder that this process is in, if there is one."""
    mount = next((line.split(" ")[4] for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line), None)
    path = next((line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")), None)
    return Path(mount + path) if mount is not None and path is not None else None


def make_group(name: str) -> Path | None:
    """Make a group beside this process. None where that cannot be done: no cgroup v2, or not ours to write."""
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
    """Move a process into the group. Returns whether that could be done."""
    try:
        (group / "cgroup.procs").write_text(str(pid))
    except OSError:
        return False
    return True


def kill_group(group: Path) -> None:
    """Kill everything in the group and below, wait until it is empty, and remove it. Blocks: run it in a thread.

    Raises:
        OSError: something in it does not die.
    """
    if not group.exists():
        return
    until = time.monotonic() + EMPTY_WITHIN_S
    while _populated(group):
        _kill_all(group)
        if time.monotonic() > until:
            raise OSError(f"processes in {group} have not ended within {EMPTY_WITHIN_S:g} s")
        time.sleep(LOOK_EVERY_S)
    _remove(group)


def sweep_groups(prefix: str) -> None:
    """Remove the groups beside this process that begin so, hold nobody, and are older than `STALE_S`: their service was killed. Blocks."""
    parent = own_group()
    for group in parent.glob(f"{prefix}s-*") if parent is not None else ():
        # Another service of this machine may be removing it too, or may not let us.
        with suppress(OSError):
            if time.time() - group.stat().st_mtime > STALE_S and not _populated(group):
                _remove(group)


def remove_groups_of(agent_pid: int) -> None:
    """Remove the groups that an agent made for itself, outside of its sandbox's or where that has none: one that was killed could not. Blocks.

    Raises:
        OSError: something in one of them does not end.
    """
    if start_time(agent_pid) is not None:
        return  # the pid is another process's by now
    until = time.monotonic() + EMPTY_WITHIN_S
    while left := [group for parent in group_parents() for group in parent.glob(f"{GROUP_PREFIX}{agent_pid}-*") if _is_left(group)]:
        if time.monotonic() > until:
            raise OSError(f"processes in {left[0]} have not ended within {EMPTY_WITHIN_S:g} s")
        time.sleep(LOOK_EVERY_S)


def _is_left(group: Path) -> bool:
    """Whether a group of ours is still there after being removed."""
    with suppress(FileNotFoundError):
        if group.stat().st_uid != os.geteuid():
            return False
        with suppress(OSError):  # busy
            _remove(group)
        return group.exists()
    return False


def group_parents() -> set[Path]:
    """Where an agent of ours may have made its own groups: beside this process, at the top where what we are in is not shown here, or in the machine's."""
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

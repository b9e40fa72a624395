"""Where the control groups of this process are, and the processor quota that those around it have. It changes nothing."""

from __future__ import annotations

import os
from typing import Iterator


def list_cgroup_mounts() -> Iterator[tuple[str, str, set[str]]]:
    """Yield the mount point, the file system type and the options of every cgroup mount."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            left, _, right = line.partition(" - ")
            kind, _, options = right.split(" ", 2)
            if kind in ("cgroup", "cgroup2"):
                yield left.split(" ")[4], kind, set(options.strip().split(","))


def read_own_groups() -> dict[str, str]:
    """Return the path of the group of this process for each controller. The key of cgroup v2 is the empty string."""
    paths = {}
    with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for controller in controllers.split(","):
                paths[controller] = path
    return paths


def read_processor_quota() -> float | None:
    """Return how many processors this process and all others of its container may keep busy together: the smallest quota of the groups around it.

    Returns:
        The number of processors, which can be a fraction; None if there is no quota.
    """
    own = read_own_groups()
    quotas = []
    for mount, kind, options in list_cgroup_mounts():
        if kind == "cgroup2":
            quotas.append(find_smallest_quota(mount, own.get("", "/")))
        elif "cpu" in options:
            quotas.append(find_smallest_quota(mount, own.get("cpu", "/")))
    return min((quota for quota in quotas if quota is not None), default=None)


def find_smallest_quota(mount: str, own_path: str) -> float | None:
    """Return the smallest processor quota of a group and of all groups around it, in processors; None if none of them has one.

    Args:
        mount: where the hierarchy is mounted.
        own_path: the group, relative to the mount. If the mount does not show it, as in some containers, the mount itself counts.
    """
    path = os.path.normpath(mount + own_path)
    if not os.path.isdir(path):
        path = mount
    smallest = None
    while True:
        quota = _read_quota(path)
        if quota is not None and (smallest is None or quota < smallest):
            smallest = quota
        if path == os.path.normpath(mount) or path == os.path.dirname(path):
            return smallest
        path = os.path.dirname(path)


def _read_quota(folder: str) -> float | None:
    words = _read_words(os.path.join(folder, "cpu.max"))
    if not words:
        words = _read_words(os.path.join(folder, "cpu.cfs_quota_us")) + _read_words(os.path.join(folder, "cpu.cfs_period_us"))
    if len(words) != 2 or words[0] in ("max", "-1"):
        return None
    return int(words[0]) / int(words[1])


def _read_words(path: str) -> list[str]:
    """Return the words in a control file; none if there is no such file. The group at the top of a hierarchy has no quota."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read().split()
    except FileNotFoundError:
        return []

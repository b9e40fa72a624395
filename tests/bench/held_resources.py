"""Counts what a service and its agent hold of the machine besides memory: descriptors, processes, control groups, mounts, and files and folders."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import psutil

from tests.support.service import Service

CGROUPS = Path("/sys/fs/cgroup")
WITHIN_S = 60.0  # What an ended slot held is given back in the background.
POLL_INTERVAL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class HeldResources:
    """How many of each kind are held.

    Args:
        service_descriptors: open files of the service.
        agent_descriptors: open files of the agent and of its templates.
        processes: descendants of the agent.
        groups: control groups of the agent and of its slots.
        mounts: mounts that the machine, the agent and its templates see.
        files: files and folders in the folders of the service and of its sandboxes.
    """

    service_descriptors: int
    agent_descriptors: int
    processes: int
    groups: int
    mounts: int
    files: int

    def describe_growth(self, before: HeldResources) -> list[str]:
        """Return a text for each kind of which more is held than before."""
        names = [field.name for field in fields(self) if getattr(self, field.name) > getattr(before, field.name)]
        return [f"{name}: {getattr(before, name)} before, {getattr(self, name)} after" for name in names]


class ResourceCounter:
    """Counts what one service with one sandbox holds.

    Args:
        service: the service.
    """

    def __init__(self, service: Service) -> None:
        (handle,) = (service.state_dir / "sandboxes").glob("*/handle.json")
        data = json.loads(handle.read_text(encoding="utf-8"))["data"]
        self._folders = {service.state_dir, *(Path(data[name]) for name in ("workspaces", "socket_dir") if name in data)}
        self._service_pid = service.process.pid
        self.agent = psutil.Process(data["pid"])

    def _with_templates(self) -> list[int]:
        return [self.agent.pid, *(child.pid for child in self.agent.children() if child.name() == "slot-template")]

    def _groups(self) -> Iterator[str]:
        own = f"sandbox-pool-{self.agent.pid}-"
        for folder, _, _ in os.walk(CGROUPS):
            if own in folder:
                yield folder

    def count_resources(self) -> HeldResources:
        """Count once."""
        return HeldResources(
            service_descriptors=len(os.listdir(f"/proc/{self._service_pid}/fd")),
            agent_descriptors=sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self._with_templates()),
            processes=len(self.agent.children(recursive=True)),
            groups=sum(1 for _ in self._groups()),
            mounts=sum(_count_lines(Path(f"/proc/{pid}/mountinfo")) for pid in (os.getpid(), *self._with_templates())),
            files=sum(len(names) + len(below) for folder in self._folders for _, below, names in os.walk(folder)),
        )

    def wait_for_no_growth(self, before: HeldResources) -> HeldResources:
        """Count until nothing is more than before, for at most `WITHIN_S` seconds. Returns the last count."""
        deadline = time.monotonic() + WITHIN_S
        while (now := self.count_resources()).describe_growth(before) and time.monotonic() < deadline:
            time.sleep(POLL_INTERVAL_S)
        return now


def _count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())

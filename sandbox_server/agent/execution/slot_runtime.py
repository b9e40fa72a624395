"""What a slot is made of for one holder: its processes, its folders, its control groups. A reset replaces all of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Protocol

from sandbox_server.agent.execution.init_client.init_link import InitLink
from sandbox_server.agent.kernel.cgroups import SlotGroups


@dataclasses.dataclass(frozen=True)
class Dirs:
    """The folders that one slot runtime writes to: `workspace` and `tmp`, both below `root`. Nothing else is in `root`."""

    root: str
    workspace: str
    tmp: str


@dataclasses.dataclass(frozen=True)
class CacheFolder:
    """A shared cache as a slot mounts it.

    Args:
        key: names the cache.
        path: its folder on the host.
        gid: the group that owns the folder. None: all slots run as the agent's own user, so no group is needed.
        umask: the umask of every process of a slot that mounts the cache.
    """

    key: str
    path: str
    gid: int | None
    umask: int

    @property
    def groups(self) -> list[int]:
        """The supplementary groups of a slot that mounts the cache."""
        return [self.gid] if self.gid is not None else []


@dataclasses.dataclass(frozen=True)
class ReadOnlyEntry:
    """An entry at the top of the workspace that the slot can read but not change, as the agent has examined it.

    Args:
        name: its name.
        device: the device of its file system.
        inode: its inode.
    """

    name: str
    device: int
    inode: int

    @property
    def message(self) -> tuple[str, int, int]:
        """The entry in the configuration of init."""
        return self.name, self.device, self.inode


@dataclasses.dataclass(frozen=True)
class SlotNetwork:
    """A network namespace for one slot, with a way to the internet.

    Args:
        number: names it for the network process.
        namespace_fd: a descriptor of the namespace. It is closed when the slot has started.
    """

    number: int
    namespace_fd: int


@dataclasses.dataclass(frozen=True)
class LimitEnd:
    """Why the agent ended all processes of a slot: the slot used too much of something that slots share.

    Args:
        reason: the reason with which the calls of the slot end.
        error: what happened, as a sentence.
        evidence: the measurements behind it.
        own_work: whether the slot alone caused it: it passed a limit of its own, or it would have filled what all slots share even if the other
            slots had used nothing. If False, the use of other slots was needed as well, so the fault is ambiguous.
    """

    reason: str
    error: str
    evidence: Mapping[str, Any]
    own_work: bool

    def metadata(self) -> dict[str, Any]:
        """The metadata of a call that ended because its slot was ended."""
        return {"evidence": {**self.evidence, "slot_ended": True, **({"own_work": True} if self.own_work else {"ambiguous": True})}}


class ChildProcess(Protocol):
    """A child process of the agent, such as `subprocess.Popen`."""

    @property
    def pid(self) -> int:
        """The process id."""

    def poll(self) -> int | None:
        """Return how the process has ended: its exit code, or the number of a signal as a negative number; None while it runs."""

    def kill(self) -> None:
        """Send SIGKILL to the process if it has not ended."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process if it has not ended."""


@dataclasses.dataclass
class SlotRuntime:
    """A slot's processes, folders and control groups from one reset to the next.

    Args:
        slot_id: the slot that has this runtime. It changes when a prepared runtime is given to a slot.
        dirs: the folders on the host.
        workspace: the path of the workspace as the slot sees it.
        tmp: the path of the temporary folder as the slot sees it.
        has_network: whether the processes can reach the network.
        process: the child process of the agent: init, or the bubblewrap process that waits for init.
        link: the control socket to init.
        init_pid: the process id of init as the agent sees it.
        init_pidfd: a pidfd of init, -1 where the Python version has none.
        has_pid_namespace: whether the slot has its own pid namespace, whose processes the kernel ends when init ends.
        uid: the user id of the slot's processes; None: the agent's own.
        groups: the control groups of the slot.
        shell: the path of bash as the slot sees it.
        stderr_fd: the read end of init's standard error, -1 if init was forked.
        cache: the shared cache that is mounted.
        limit_end: why the agent ended all processes of the slot, if it did so because of a limit.
        network: the slot's own way to the internet; None if the slot has the network of the sandbox, or none.
        may_have_passed_files: whether its processes, or those of an earlier runtime with the same folders, could pass open files to other slots.
    """

    slot_id: str
    dirs: Dirs
    workspace: str
    tmp: str
    has_network: bool
    process: ChildProcess
    link: InitLink
    init_pid: int
    init_pidfd: int
    has_pid_namespace: bool
    uid: int | None
    groups: SlotGroups
    shell: str
    stderr_fd: int
    cache: CacheFolder | None = None
    limit_end: LimitEnd | None = None
    network: SlotNetwork | None = None
    may_have_passed_files: bool = True

    @property
    def has_own_network_namespace(self) -> bool:
        """Whether the slot has a network namespace of its own, so that what listens in it can be reached from nowhere else."""
        return self.network is not None or not self.has_network

"""The interface of an isolation mode, and what all modes need to set up a slot: its settings, its folders and its shell."""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
from typing import Any, Protocol, Sequence

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import agent_limit, slot_limit
from sandbox_server.agent.execution.slot_runtime import CacheFolder, Dirs, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.kernel.processor_share import Processors
from sandbox_server.agent.network.slot_networks import SlotNetworks

END_TIMEOUT_S = 10.0
_RLIMIT_MARGIN_PROCESSES = 64  # The control group must refuse first, because it counts what it refuses.
UMASK = 0o022
SHM_BYTES = 256 << 20
SLOT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclasses.dataclass(frozen=True)
class IsolationContext:
    """The settings of this agent that the isolation modes use.

    Args:
        config: the configuration of the agent.
        slots_dir: the folder in which the folders of slots are created.
        lib_dir: the folder with the code of init.
        filter: the system call filter of slots that have their own message queues.
        shared_filter: the system call filter of slots that share the message queues of the machine.
        processors: the processors that the slots share.
        sets_floor: whether this process may set the minimum `oom_score_adj` of a slot.
        networks: the networks of the slots; None if slots with the network have that of the sandbox.
    """

    config: AgentConfig
    slots_dir: str
    lib_dir: str
    filter: bytes
    shared_filter: bytes
    processors: Processors
    sets_floor: bool = False
    networks: SlotNetworks | None = None

    def environment(self, workspace: str, tmp: str | None, cache: str | None = None) -> dict[str, str]:
        """Return the environment variables of all processes of a slot.

        Args:
            workspace: the path of the workspace as the slot sees it.
            tmp: the path for TMPDIR; None if the slot uses /tmp.
            cache: the path of the shared cache as the slot sees it; None if it has none.

        Raises:
            StartFailed: there is no bash on this machine.
        """
        threads = str(self.processors.count_of_slot(self.config.limits.cpu))
        env = {
            "PATH": SLOT_PATH,
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "HOME": workspace,
            "SHELL": find_shell(),  # Without it, each bash reads /etc/passwd when it starts, which takes a tenth of its time.
            "SANDBOX_WORKSPACE": workspace,
            "OMP_NUM_THREADS": threads,  # `nproc` prints it, too.
            "PYTHON_CPU_COUNT": threads,
        }
        if tmp is not None:
            env["TMPDIR"] = tmp
        if cache is not None:
            env["SANDBOX_CACHE"] = cache
        env.update(self.config.env_vars)
        return env

    def rlimits(self, memory_by_cgroup: bool, processes_by_cgroup: bool) -> dict[str, int]:
        """Return the resource limits of every process of a slot.

        A control group is better than an rlimit, because it counts what it refuses. Where one applies, the rlimit is omitted or higher than its limit.

        Args:
            memory_by_cgroup: whether a control group limits the memory.
            processes_by_cgroup: whether a control group limits the number of processes.
        """
        limits = self.config.limits
        processes = limits.processes + (_RLIMIT_MARGIN_PROCESSES if processes_by_cgroup else 0)
        values = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": limits.max_file_mb << 20, "RLIMIT_NPROC": processes, "RLIMIT_NOFILE": slot_limit(agent_limit())}
        if limits.memory_mb is not None and not memory_by_cgroup:
            values["RLIMIT_DATA"] = limits.memory_mb << 20
        return values


class Isolation(Protocol):
    """One isolation mode.

    Attributes:
        name: the name of the mode.
        networks: the kinds of network access that the mode can give a slot: `none`, `shared`, `internet`.
        tmp_isolation: `own` if a slot has its own `/tmp`, `/dev/shm` and IPC; `shared`, with the reason, if it shares them with the machine. It is final after
            the first slot was started.
        slot_start: how inits start: `forked` from a template, or `executed`, with the reason if the template has failed. It is final after the first slot was
            started, unless the machine was short of something: then some further slots try the template again.
        caches: whether a shared cache can be given to a slot and be taken away again.
        read_only_entries: whether entries of the workspace can be made read-only. It is final after the first slot was started.
    """

    name: str
    networks: tuple[str, ...]
    tmp_isolation: str
    caches: bool

    @property
    def read_only_entries(self) -> bool: ...

    @property
    def slot_start(self) -> str: ...

    async def start_runtime(
        self,
        slot_id: str,
        has_network: bool,
        reused: SlotRuntime | None = None,
        cache: CacheFolder | None = None,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        """Start the runtime of a slot.

        Args:
            slot_id: the slot.
            has_network: whether the slot can reach the network.
            reused: an ended runtime whose folders and user are used again; None for new ones.
            cache: the shared cache that the slot mounts; None for none. Only modes with `caches` accept one.
            read_only: the entries of the workspace of `reused` that the slot cannot change. Only modes with `read_only_entries` accept any.

        Raises:
            StartFailed: the runtime could not be started; the text says why.
        """

    async def end_runtime(self, runtime: SlotRuntime) -> dict[str, Any]:
        """Kill all processes of a runtime and check that none is left.

        Returns:
            The proof. `clean` says whether nothing is left, and `detail` says what is left.
        """

    def keep_folders(self, runtime: SlotRuntime) -> bool:
        """Keep the folders of a runtime, whose end `end_runtime` has proven, for another one if they are as new. Returns False if they must be deleted."""

    def free_uid(self, runtime: SlotRuntime) -> None:
        """Make the user id of an ended runtime available again. Call it after `end_runtime` has proven its end and its folders have been removed."""

    def remove_mode_files(self) -> None:
        """Remove the files that the mode itself has created, and end its processes. Call it after all runtimes have ended."""


def find_shell() -> str:
    """Return the path of bash.

    Raises:
        StartFailed: there is no bash on this machine.
    """
    for path in ("/bin/bash", "/usr/bin/bash"):
        if os.path.exists(path):
            return path
    found = shutil.which("bash", path=SLOT_PATH)
    if found is None:
        raise StartFailed("there is no bash on this machine")
    return found


def make_dirs(folder: str, uid: int | None) -> Dirs:
    """Create the empty folders of a new slot runtime.

    Args:
        folder: the folder that contains them; it must not exist.
        uid: the owner; None for the user of the agent.
    """
    os.makedirs(folder, mode=0o700)
    dirs = dirs_in(folder)
    make_writable_dirs(dirs, uid)
    return dirs


def dirs_in(folder: str) -> Dirs:
    """Return the paths of the folders of a slot runtime in this folder."""
    return Dirs(root=folder, workspace=os.path.join(folder, "workspace"), tmp=os.path.join(folder, "tmp"))


def make_writable_dirs(dirs: Dirs, uid: int | None) -> None:
    """Create the workspace and the temporary folder of a slot, owned by `uid`, or by the user of the agent if it is None."""
    for path in (dirs.workspace, dirs.tmp):
        os.mkdir(path, 0o700)
        if uid is not None:
            os.chown(path, uid, uid)


def find_dirs_problem(dirs: Dirs, uid: int | None) -> str | None:
    """Check that the folders of a new runtime are empty, belong to the user of the slot, and are closed to other users.

    Returns:
        None if they are correct, else a sentence that says what is wrong.
    """
    for path in (dirs.workspace, dirs.tmp):
        info = os.lstat(path)
        if os.listdir(path):
            return "%s is not empty" % os.path.basename(path)
        if info.st_mode & 0o7777 != 0o700 or (uid is not None and info.st_uid != uid):
            return "%s has mode %o and owner %d" % (os.path.basename(path), info.st_mode & 0o7777, info.st_uid)
    return None


def interpreter() -> str:
    """Return the real path of the interpreter that runs this agent."""
    return os.path.realpath(sys.executable)

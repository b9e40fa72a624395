"""Starts the init of a slot in the mode `bwrap` by executing bubblewrap and an interpreter, where the inits of slots cannot be forked from a template."""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
from typing import Any, Mapping, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder, Dirs, ReadOnlyEntry, SlotNetwork
from sandbox_server.agent.isolation import bwrap_arguments as arguments
from sandbox_server.agent.isolation import init_start
from sandbox_server.agent.isolation.bwrap_processes import kill_bwrap_processes
from sandbox_server.agent.kernel.cgroups import SlotGroups

INSIDE_UID = 1000


@dataclasses.dataclass(frozen=True)
class BwrapPlan:
    """What the init of one slot starts with.

    Args:
        dirs: the folders of the slot.
        accounts: the files that are mounted as /etc/passwd and /etc/group.
        uid: the user of the slot; None if it is the user of the agent, in a user namespace.
        groups: the control groups of the slot.
        has_network: whether the slot can reach the network.
        network: the slot's own way to the internet; None if it has the network of the sandbox, or none.
        cache: the shared cache that the slot mounts.
        read_only: the entries of the workspace that the slot cannot change.
        init_config: the configuration of init.
        sets_floor: whether the minimum `oom_score_adj` of the slot is set.
    """

    dirs: Dirs
    accounts: tuple[str, str]
    uid: int | None
    groups: SlotGroups
    has_network: bool
    network: SlotNetwork | None
    cache: CacheFolder | None
    read_only: Sequence[ReadOnlyEntry]
    init_config: Mapping[str, Any]
    sets_floor: bool


@dataclasses.dataclass(frozen=True)
class SharedView:
    """What all slots of an agent see of the machine.

    Args:
        bwrap: the path of bubblewrap.
        etc: the folder that is mounted as /etc.
        lib_dir: the folder with the code of init.
        expose: folders of the machine that slots can read.
    """

    bwrap: str
    etc: str
    lib_dir: str
    expose: Sequence[str]

    def arguments(self, shm: bool) -> tuple[str, list[str]]:
        """See `bwrap_arguments.machine_args`."""
        return arguments.machine_args(self.etc, self.lib_dir, self.expose, shm)


def find_bwrap() -> str:
    """Return the path of bubblewrap.

    Raises:
        StartFailed: it is not in PATH.
    """
    program = shutil.which("bwrap")
    if program is None:
        raise StartFailed("bubblewrap (bwrap) is not in PATH")
    return program


class BwrapStart:
    """Starts each init through bubblewrap.

    Args:
        view: what all slots see of the machine.
        is_root: whether this agent runs as root. Otherwise bubblewrap creates a user namespace.
    """

    def __init__(self, view: SharedView, is_root: bool) -> None:
        self._python, machine_args = view.arguments(shm=True)
        self._common_args = [view.bwrap, *_namespace_args(is_root), *machine_args]

    async def start_init(self, plan: BwrapPlan) -> init_start.StartedInit:
        """Start the init of a slot, and wait until it serves requests.

        Raises:
            StartFailed: the start failed; the text says why.
        """
        agent_socket, init_socket = init_start.create_control_sockets()
        argv = [*self._common_args, *_slot_args(plan)]
        library_path = arguments.library_path(self._python)
        if library_path:
            argv += ["--setenv", "LD_LIBRARY_PATH", library_path]
        argv += ["--", *init_start.init_argv(self._python, arguments.LIB, init_socket.fileno())]
        kill_rest = functools.partial(kill_bwrap_processes, plan.dirs.root)
        return await init_start.start_init(
            argv, init_socket, agent_socket, plan.init_config, plan.groups.join_fds, sets_floor=plan.sets_floor, kill_rest=kill_rest
        )

    def end_start(self) -> None:
        """Do nothing: bubblewrap ends with each slot."""


def _namespace_args(is_root: bool) -> list[str]:
    args = [
        "--unshare-pid",
        "--unshare-ipc",
        "--unshare-uts",
        "--hostname",
        "slot",
        "--unshare-cgroup-try",
        "--die-with-parent",
        "--new-session",
        "--as-pid-1",
    ]
    if is_root:
        return [*args, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
    return [*args, "--unshare-user", "--disable-userns", "--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID), "--cap-drop", "ALL"]


def _slot_args(plan: BwrapPlan) -> list[str]:
    passwd, group = plan.accounts
    dirs = plan.dirs
    args = ["--ro-bind", passwd, "/etc/passwd", "--ro-bind", group, "/etc/group"]
    if not plan.has_network:
        args.append("--unshare-net")
    args += ["--bind", dirs.workspace, arguments.WORKSPACE, "--bind", dirs.tmp, arguments.TMP]
    args += ["--dir", "/var", "--bind", dirs.tmp, "/var/tmp", "--dir", "/run"]
    if plan.cache is not None:
        args += ["--bind", plan.cache.path, arguments.CACHE]
    for entry in plan.read_only:  # No process of the slot runs now, and init checks that these are the entries that the agent has examined.
        args += ["--ro-bind", os.path.join(dirs.workspace, entry.name), os.path.join(arguments.WORKSPACE, entry.name)]
    return [*args, "--remount-ro", "/", "--chdir", "/"]

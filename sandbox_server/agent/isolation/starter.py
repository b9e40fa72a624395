"""Starts slot runtimes that see the file system of the machine, for the modes `uid` and `none`.

In `uid`, a slot has its own user, and its own `/tmp`, `/dev/shm` and IPC where init may create namespaces.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, Sequence

from sandbox_server.agent.execution.slot_runtime import Dirs, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.kernel.cgroups import Cgroups, SlotGroups
from sandbox_server.agent.kernel.uids import helper_uid_of

_LOCK_BYTES = 16 << 20


def library_environment() -> dict[str, str]:
    """Return the library path that the interpreter of this agent was started with. Only init gets it, not the processes of the slot."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": path} if path else {}


async def _start_shared_init(
    context: base.IsolationContext,
    mode: str,
    dirs: Dirs,
    uid: int | None,
    groups: SlotGroups,
    runtime_number: int,
    has_private_mounts: bool,
    read_only: Sequence[ReadOnlyEntry],
) -> init_start.StartedInit:
    """Start an init that sees the file system of the machine, except for the shared folders if `has_private_mounts` is set.

    Args:
        context: the settings of the agent.
        mode: `uid` or `none`.
        dirs: the folders of the slot.
        uid: the user of the slot; None for the user of the agent.
        groups: the control groups of the slot.
        runtime_number: the number of the runtime, which determines its processors.
        has_private_mounts: whether the slot gets its own `/tmp`, `/dev/shm` and other shared folders.
        read_only: the entries of the workspace that the slot cannot change.

    Raises:
        StartFailed: init could not be started.
    """
    agent_socket, init_socket = init_start.create_control_sockets()
    affinity = context.affinity(runtime_number)
    config: dict[str, Any] = {
        "mode": mode,
        "uid": uid,
        "gid": uid,
        "helper_uid": helper_uid_of(uid) if uid is not None else None,
        "groups": [],
        "umask": base.UMASK,
        "env": context.environment(len(affinity), dirs.workspace, None if has_private_mounts else dirs.tmp),
        "home": dirs.workspace,
        "roots": [dirs.workspace, "/tmp"] if has_private_mounts else [dirs.workspace, dirs.tmp, "/tmp"],
        "private_mounts": private_mount_sources(dirs) if has_private_mounts else None,
        "read_only": [entry.message for entry in read_only],
        "limits": context.rlimits(groups.limits_memory, groups.limits_processes),
        "affinity": affinity,
        "lib": context.lib_dir,
        "filter": context.filter if has_private_mounts else context.shared_filter,
    }
    argv = init_start.init_argv(base.interpreter(), context.lib_dir, init_socket.fileno())
    return await init_start.start_init(argv, init_socket, agent_socket, config, groups.join_fds, library_environment(), context.sets_floor)


def private_mount_sources(dirs: Dirs) -> dict[str, str]:
    """Return what is mounted on the shared folders in a slot, see `private_mounts.mount_private_folders`."""
    return {
        "/tmp": dirs.tmp,
        "/var/tmp": dirs.tmp,
        "/dev/shm": "mode=1777,size=%d" % base.SHM_BYTES,
        "/dev/mqueue": "mqueue",
        "/run/lock": "mode=1777,size=%d" % _LOCK_BYTES,
    }


class SharedViewStarter:
    """Starts slot runtimes and creates their control groups and folders.

    Args:
        context: the settings of the agent.
        cgroups: creates control groups.
        slots_dir: the folder in which the folders of the runtimes are created.
    """

    def __init__(self, context: base.IsolationContext, cgroups: Cgroups, slots_dir: str) -> None:
        self.context = context
        self._cgroups = cgroups
        self._slots_dir = slots_dir
        self._runtime_count = 0

    async def start_runtime(
        self,
        mode: str,
        slot_id: str,
        has_network: bool,
        uid: int | None,
        reused: SlotRuntime | None,
        has_private_mounts: bool = False,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        """Start a slot runtime.

        Args:
            mode: `uid` or `none`.
            slot_id: the slot.
            has_network: whether the slot can reach the network.
            uid: the user of the slot; None for the user of the agent.
            reused: an ended runtime whose folders are used again; None for new ones.
            has_private_mounts: whether the slot gets its own `/tmp`, `/dev/shm` and other shared folders.
            read_only: the entries of the workspace that the slot cannot change. They need `has_private_mounts`.

        Raises:
            StartFailed: the runtime could not be started.
        """
        shell = base.find_shell()  # first, because a failure after the start of init would leave init behind
        self._runtime_count += 1
        name = "%s-%d" % (mode, self._runtime_count)
        dirs = reused.dirs if reused is not None else base.make_dirs(os.path.join(self._slots_dir, name), uid)
        groups = self._cgroups.make_groups(name)
        try:
            started_init = await _start_shared_init(self.context, mode, dirs, uid, groups, self._runtime_count, has_private_mounts, read_only)
        except BaseException:  # also when this task is cancelled
            groups.remove_groups()
            if reused is None:
                shutil.rmtree(dirs.root)  # No process of the slot has used it.
            raise
        finally:
            groups.close_join_fds()
        tmp = "/tmp" if has_private_mounts else dirs.tmp
        return started_init.to_runtime(slot_id, dirs, dirs.workspace, tmp, has_network=has_network, uid=uid, groups=groups, shell=shell)

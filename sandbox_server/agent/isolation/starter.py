"""Starts slot runtimes that see the file system of the machine, for the modes `uid` and `none`.

In `uid`, a slot has its own user, and its own `/tmp`, `/dev/shm` and IPC where init may create namespaces. Its init is forked from a template where the kernel
can do it; the first slot shows that.
"""

from __future__ import annotations

import logging
import os
import shutil
from typing import Any, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import Dirs, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.init import private_mounts, privileges
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.isolation.forking.slot_template import MAX_FIRST_TRIES, SlotTemplate
from sandbox_server.agent.isolation.forking.template_process import TemplateProcess, start_template
from sandbox_server.agent.kernel.cgroups import Cgroups, SlotGroups
from sandbox_server.agent.kernel.uids import helper_uid_of

log = logging.getLogger(__name__)

_LOCK_BYTES = 16 << 20
#: To become the user of the slot, to mount its own folders, and to find the read-only entries of its workspace.
_CAPABILITIES = privileges.CAP_SETUID | privileges.CAP_SETGID | privileges.CAP_SYS_ADMIN | privileges.CAP_DAC_READ_SEARCH


def library_environment() -> dict[str, str]:
    """Return the library path that the interpreter of this agent was started with. Only init gets it, not the processes of the slot."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": path} if path else {}


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
        forks: whether inits are forked from a template if that works.

    Attributes:
        slot_start: see `Isolation.slot_start`.
    """

    def __init__(self, context: base.IsolationContext, cgroups: Cgroups, slots_dir: str, forks: bool = False) -> None:
        self.context = context
        self._cgroups = cgroups
        self._slots_dir = slots_dir
        self._runtime_count = 0
        self._template = SlotTemplate(self._start_template) if forks and context.config.slot_start == "auto" else None
        self._template_tries = 0
        self.slot_start = "executed"

    async def _start_template(self) -> TemplateProcess:
        request = {"unmounts": (), "capabilities": _CAPABILITIES, "filters": (self.context.filter, self.context.shared_filter)}
        return await start_template(base.interpreter(), self.context.lib_dir, request, library_environment())

    def end_template(self) -> None:
        """End the template of the slots. Call it after all runtimes have ended."""
        if self._template is not None:
            self._template.end_template()

    async def _start_init(
        self, mode: str, dirs: Dirs, uid: int | None, groups: SlotGroups, has_private_mounts: bool, read_only: Sequence[ReadOnlyEntry]
    ) -> init_start.StartedInit:
        """Start an init that sees the file system of the machine, except for the shared folders if `has_private_mounts` is set.

        Args:
            mode: `uid` or `none`.
            dirs: the folders of the slot.
            uid: the user of the slot; None for the user of the agent.
            groups: the control groups of the slot.
            has_private_mounts: whether the slot gets its own `/tmp`, `/dev/shm` and other shared folders.
            read_only: the entries of the workspace that the slot cannot change.

        Raises:
            StartFailed: init could not be started.
        """
        context = self.context
        config: dict[str, Any] = {
            "mode": mode,
            "uid": uid,
            "gid": uid,
            "helper_uid": helper_uid_of(uid) if uid is not None else None,
            "groups": [],
            "umask": base.UMASK,
            "env": context.environment(dirs.workspace, None if has_private_mounts else dirs.tmp),
            "home": dirs.workspace,
            "roots": [dirs.workspace, "/tmp"] if has_private_mounts else [dirs.workspace, dirs.tmp, "/tmp"],
            "private_mounts": private_mount_sources(dirs) if has_private_mounts else None,
            "read_only": [entry.message for entry in read_only],
            "limits": context.rlimits(groups.limits_memory, groups.limits_processes),
            "lib": context.lib_dir,
            "filter": context.filter if has_private_mounts else context.shared_filter,
        }
        if self._template is not None:
            try:
                started_init = await self._template.start_init(0, {"view": None}, (), groups.join_fds, config, context.sets_floor)
            except StartFailed as error:
                if self.slot_start == "forked" or private_mounts.FAILURE_PREFIX in str(error):
                    raise
                self._template_tries += 1
                self.slot_start = "executed: %s" % error
                if not error.temporary or self._template_tries >= MAX_FIRST_TRIES:
                    self.end_template()
                    self._template = None
                log.info("slots are not forked from a template: %s", error)
            else:
                self.slot_start = "forked"
                return started_init
        agent_socket, init_socket = init_start.create_control_sockets()
        argv = init_start.init_argv(base.interpreter(), context.lib_dir, init_socket.fileno())
        return await init_start.start_init(argv, init_socket, agent_socket, config, groups.join_fds, library_environment(), context.sets_floor)

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
            started_init = await self._start_init(mode, dirs, uid, groups, has_private_mounts, read_only)
        except BaseException:  # also when this task is cancelled
            groups.remove_groups()
            if reused is None:
                shutil.rmtree(dirs.root)  # No process of the slot has used it.
            raise
        finally:
            groups.close_join_fds()
        tmp = "/tmp" if has_private_mounts else dirs.tmp
        return started_init.to_runtime(slot_id, dirs, dirs.workspace, tmp, has_network=has_network, uid=uid, groups=groups, shell=shell)

"""Starts the init of a slot in the mode `bwrap` by a fork of a template, in whose mount namespace bubblewrap has mounted what all slots see of the machine."""

from __future__ import annotations

import itertools
import os
from typing import Any, Awaitable, Callable

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS
from sandbox_server.agent.execution.slot_runtime import Dirs, ReadOnlyEntry
from sandbox_server.agent.init import privileges
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.isolation import bwrap_arguments as arguments
from sandbox_server.agent.isolation.bwrap_start import INSIDE_UID, BwrapPlan, SharedView
from sandbox_server.agent.isolation.forking.mount_holder import open_namespaces
from sandbox_server.agent.isolation.forking.slot_template import SlotTemplate
from sandbox_server.agent.isolation.forking.template_process import Launcher, TemplateProcess, start_template
from sandbox_server.agent.isolation.starter import library_environment
from sandbox_server.agent.network.slot_networks import SlotNetworks
from sandbox_server.agent.template import system_calls
from sandbox_server.agent.template.detached_mounts import open_detached_mount

_NAMESPACES = system_calls.CLONE_NEWNS | system_calls.CLONE_NEWPID | system_calls.CLONE_NEWIPC | system_calls.CLONE_NEWUTS
#: To mount file systems and to start the loopback interface, and to become the user of the slot.
_CAPABILITIES_OF_ROOT = privileges.CAP_SYS_ADMIN | privileges.CAP_NET_ADMIN | privileges.CAP_SETUID | privileges.CAP_SETGID
#: In a user namespace, where they concern nothing outside of it: to mount the folders of slots, and to let a slot map its user.
_CAPABILITIES_OF_USER = privileges.CAP_SYS_ADMIN | privileges.CAP_SYS_CHROOT | privileges.CAP_SETFCAP
_MOUNT_POINTS = (arguments.WORKSPACE, arguments.TMP, "/var", "/var/tmp", "/run")


class BwrapTemplate:
    """Starts each init by a fork of a template. There is a second template for slots with a shared cache, because only these see its mount point.

    Args:
        view: what all slots see of the machine.
        folder: the folder of the agent.
        is_root: whether this agent runs as root.
        system_call_filter: the filter of the slots.
        networks: the networks of the slots; None if slots with the network have that of the sandbox.
    """

    def __init__(self, view: SharedView, folder: str, is_root: bool, system_call_filter: bytes, networks: SlotNetworks | None) -> None:
        self._view = view
        self._folder = folder
        self._is_root = is_root
        self._filter = system_call_filter
        self._networks = networks
        self._numbers = itertools.count(1)
        self._templates = {has_cache: SlotTemplate(self._make_start(has_cache)) for has_cache in (False, True)}

    def _make_start(self, has_cache: bool) -> Callable[[], Awaitable[TemplateProcess]]:
        return lambda: self._start_template(has_cache)

    async def _start_template(self, has_cache: bool) -> TemplateProcess:
        python, args = self._view.arguments(shm=False)
        for path in (*_MOUNT_POINTS, *((arguments.CACHE,) if has_cache else ())):
            args += ["--dir", path]
        # The variable is for bubblewrap alone: `kill_bwrap_processes` finds its processes by this path.
        marker = os.path.join(self._folder, "template-%d" % next(self._numbers))
        args += ["--remount-ro", "/", "--chdir", "/", "--setenv", "MARKER", marker + "/", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if not self._is_root:
            # With a pid namespace, which ends at once, the /proc that the slots cover with their own shows no process.
            # A template can only start slots in networks that belong to its own user namespace.
            users = ["--userns", str(self._networks.users_fd)] if self._networks is not None else ["--unshare-user"]
            args += [*users, "--uid", "0", "--gid", "0", "--unshare-pid", "--as-pid-1"]
        kinds = ("mnt",) if self._is_root else ("mnt", "user")
        pass_fds = (self._networks.users_fd,) if self._networks is not None and not self._is_root else ()
        namespace_fds = await open_namespaces(self._view.bwrap, args, base.find_shell(), marker, kinds, pass_fds)
        library_path = arguments.library_path(python)
        try:
            users_fd = -1 if self._is_root else namespace_fds[1]
            launcher = Launcher(namespace_fds[0], users_fd, base.interpreter(), self._view.lib_dir, library_environment())
            # Every slot gets its own. In a user namespace, a slot can only mount its own /proc where it sees another one.
            unmounts = ("/dev/pts", "/proc") if self._is_root else ("/dev/pts",)
            capabilities = _CAPABILITIES_OF_ROOT if self._is_root else _CAPABILITIES_OF_USER
            request = {"unmounts": unmounts, "capabilities": capabilities, "filters": (self._filter,), "joins_networks": self._networks is not None}
            return await start_template(python, arguments.LIB, request, {"LD_LIBRARY_PATH": library_path} if library_path else {}, launcher)
        finally:
            for fd in namespace_fds:
                os.close(fd)

    async def start_init(self, plan: BwrapPlan) -> init_start.StartedInit:
        """Fork the init of a slot, and wait until it serves requests.

        Raises:
            StartFailed: the start failed; the text says why.
        """
        mounts = _list_mounts(plan)
        view = {
            "shm": arguments.SHM_OPTIONS,
            "mounts": [target for target, _, _ in mounts],
            "workspace": arguments.WORKSPACE,
            "read_only": [entry.message for entry in plan.read_only],
            "uid": plan.uid,
            "inside_uid": None if self._is_root else INSIDE_UID,
        }
        namespaces = _NAMESPACES | (0 if plan.has_network else system_calls.CLONE_NEWNET) | (0 if self._is_root else system_calls.CLONE_NEWUSER)
        request: dict[str, Any] = {"network": not plan.has_network, "joins_network": plan.network is not None, "view": view}
        network_fds = [plan.network.namespace_fd] if plan.network is not None else []
        folders: list[tuple[str, bool, tuple[int, int] | None]] = [(path, read_only, None) for _, path, read_only in mounts]
        # No process of the slot runs now, and each entry must still be the one that the agent has examined.
        folders += [(_path_of(plan.dirs, entry), True, (entry.device, entry.inode)) for entry in plan.read_only]
        mount_fds: list[int] = []
        try:
            if self._is_root:
                for path, read_only, expected in folders:
                    mount_fds.append(_open_mount(path, read_only, expected))
            else:
                request["folders"] = folders
            template = self._templates[plan.cache is not None]
            return await template.start_init(namespaces, request, [*network_fds, *mount_fds], plan.groups.join_fds, plan.init_config, plan.sets_floor)
        finally:
            for fd in mount_fds:
                os.close(fd)

    def end_start(self) -> None:
        """End the templates."""
        for template in self._templates.values():
            template.end_template()


def _list_mounts(plan: BwrapPlan) -> list[tuple[str, str, bool]]:
    """Return the mount point of each folder and file of the slot, its path, and whether it is read-only."""
    passwd, group = plan.accounts
    dirs = plan.dirs
    mounts = [("/etc/passwd", passwd, True), ("/etc/group", group, True)]
    mounts += [(arguments.WORKSPACE, dirs.workspace, False), (arguments.TMP, dirs.tmp, False), ("/var/tmp", dirs.tmp, False)]
    if plan.cache is not None:
        mounts.append((arguments.CACHE, plan.cache.path, False))
    return mounts


def _path_of(dirs: Dirs, entry: ReadOnlyEntry) -> str:
    return os.path.join(dirs.workspace, entry.name)


def _open_mount(path: str, read_only: bool, expected: tuple[int, int] | None = None) -> int:
    try:
        return open_detached_mount(path, read_only, expected)
    except OSError as error:
        raise StartFailed("%s could not be mounted: %s" % (path, error.strerror), temporary=error.errno in TEMPORARY_ERRORS) from None

"""Starts the init of a slot in the mode `bwrap` by a fork of a template, in whose mount namespace bubblewrap has mounted what all slots see of the machine."""

from __future__ import annotations

import errno
import itertools
import os
from typing import Awaitable, Callable

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS
from sandbox_server.agent.execution.slot_runtime import Dirs, ReadOnlyEntry
from sandbox_server.agent.init import privileges
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.isolation import bwrap_arguments as arguments
from sandbox_server.agent.isolation.bwrap_start import BwrapPlan, SharedView
from sandbox_server.agent.isolation.forking.mount_holder import open_mount_namespace
from sandbox_server.agent.isolation.forking.slot_template import SlotTemplate
from sandbox_server.agent.isolation.forking.template_process import Launcher, TemplateProcess, start_template
from sandbox_server.agent.isolation.starter import library_environment
from sandbox_server.agent.kernel.detached_mounts import open_detached_mount
from sandbox_server.agent.template import system_calls

_NAMESPACES = system_calls.CLONE_NEWNS | system_calls.CLONE_NEWPID | system_calls.CLONE_NEWIPC | system_calls.CLONE_NEWUTS
#: To mount file systems and to start the loopback interface, and to become the user of the slot.
_CAPABILITIES = privileges.CAP_SYS_ADMIN | privileges.CAP_NET_ADMIN | privileges.CAP_SETUID | privileges.CAP_SETGID
_UNMOUNTED = ("/dev/pts", "/proc")  # Every slot gets its own.
_MOUNT_POINTS = (arguments.WORKSPACE, arguments.TMP, "/var", "/var/tmp", "/run")


class BwrapTemplate:
    """Starts each init by a fork of a template. There is a second template for slots with a shared cache, because only these see its mount point.

    Args:
        view: what all slots see of the machine.
        folder: the folder of the agent.
        is_root: whether this agent runs as root.
    """

    def __init__(self, view: SharedView, folder: str, is_root: bool) -> None:
        self._view = view
        self._folder = folder
        self._is_root = is_root
        self._numbers = itertools.count(1)
        self._templates = {has_cache: SlotTemplate(self._make_start(has_cache)) for has_cache in (False, True)}

    def _make_start(self, has_cache: bool) -> Callable[[], Awaitable[TemplateProcess]]:
        return lambda: self._start_template(has_cache)

    async def _start_template(self, has_cache: bool) -> TemplateProcess:
        if not self._is_root:
            raise StartFailed("the agent of an ordinary user cannot fork slots")
        python, args = self._view.arguments(shm=False)
        for path in (*_MOUNT_POINTS, *((arguments.CACHE,) if has_cache else ())):
            args += ["--dir", path]
        # The variable is for bubblewrap alone: `kill_bwrap_processes` finds its processes by this path.
        marker = os.path.join(self._folder, "template-%d" % next(self._numbers))
        args += ["--remount-ro", "/", "--chdir", "/", "--setenv", "MARKER", marker + "/", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        namespace_fd = await open_mount_namespace(self._view.bwrap, args, base.find_shell(), marker)
        library_path = arguments.library_path(python)
        try:
            launcher = Launcher(namespace_fd, base.interpreter(), self._view.lib_dir, library_environment())
            request = {"unmounts": _UNMOUNTED, "capabilities": _CAPABILITIES}
            return await start_template(python, arguments.LIB, request, {"LD_LIBRARY_PATH": library_path} if library_path else {}, launcher)
        finally:
            os.close(namespace_fd)

    async def start_init(self, plan: BwrapPlan) -> init_start.StartedInit:
        """Fork the init of a slot, and wait until it serves requests.

        Raises:
            StartFailed: the start failed; the text says why.
        """
        targets: list[str] = []
        mount_fds: list[int] = []
        try:
            for target, path, read_only in _list_mounts(plan):
                mount_fds.append(_open_mount(path, read_only))
                targets.append(target)
            for entry in plan.read_only:
                mount_fds.append(_open_entry(plan.dirs, entry))
            view = {
                "shm": arguments.SHM_OPTIONS,
                "mounts": targets,
                "workspace": arguments.WORKSPACE,
                "read_only": [entry.message for entry in plan.read_only],
                "uid": plan.uid,
            }
            namespaces = _NAMESPACES | (0 if plan.has_network else system_calls.CLONE_NEWNET)
            template = self._templates[plan.cache is not None]
            request = {"network": not plan.has_network, "view": view}
            return await template.start_init(namespaces, request, mount_fds, plan.groups.join_fds, plan.init_config, plan.sets_floor)
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


def _open_mount(path: str, read_only: bool) -> int:
    try:
        return open_detached_mount(path, read_only)
    except OSError as error:
        raise StartFailed("a folder of the slot could not be mounted: %s" % error, temporary=error.errno in TEMPORARY_ERRORS) from None


def _open_entry(dirs: Dirs, entry: ReadOnlyEntry) -> int:
    """Return a detached mount of a read-only entry, which must be the one that the agent has examined. No process of the slot runs now."""
    try:
        return open_detached_mount(os.path.join(dirs.workspace, entry.name), read_only=True, expected=(entry.device, entry.inode))
    except OSError as error:
        what = "was replaced" if error.errno == errno.ESTALE else "could not be mounted: %s" % error
        raise StartFailed("the read-only entry %s of the workspace %s" % (ascii(entry.name), what), temporary=error.errno in TEMPORARY_ERRORS) from None

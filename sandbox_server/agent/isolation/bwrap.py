"""The mode `bwrap`: bubblewrap gives each slot its own namespaces.

If the agent runs as root, there is no user namespace, and init changes to the user of the slot. Otherwise bubblewrap creates a user namespace.
"""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sysconfig
from typing import Any, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.slot_runtime import CacheFolder, Dirs, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.isolation.bwrap_processes import kill_bwrap_processes
from sandbox_server.agent.isolation.etc_folder import etc_args, write_accounts, write_etc
from sandbox_server.agent.kernel import procfs
from sandbox_server.agent.kernel.cgroups import Cgroups, SlotGroups
from sandbox_server.agent.kernel.uids import UidRange

WORKSPACE = "/workspace"
TMP = "/tmp"
CACHE = "/cache"
LIB = "/.sandbox/lib"
PYTHON = "/.sandbox/python"
_INSIDE_UID = 1000
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class BwrapIsolation:
    """The mode `bwrap`."""

    name = "bwrap"
    tmp_isolation = "own"
    networks: tuple[str, ...] = ("none", "shared")
    caches = True
    read_only_entries = True

    def __init__(self, context: base.IsolationContext, cgroups: Cgroups, uids: UidRange) -> None:
        self._context = context
        self._cgroups = cgroups
        self._uids = uids
        self._is_root = os.geteuid() == 0
        self._runtime_count = 0
        self._etc = os.path.join(context.config.base_dir, "etc")
        self._program = ""
        self._common_args: list[str] = []
        self._python = ""

    def _set_up(self) -> None:
        """Prepare the arguments of bubblewrap that are the same for every slot, at the first call."""
        if self._common_args:
            return
        program = shutil.which("bwrap")
        if program is None:
            raise StartFailed("bubblewrap (bwrap) is not in PATH")
        self._program = program
        write_etc(self._etc)
        self._python, python_args = _python_args()
        self._common_args = [
            *self._namespace_args(),
            *_system_args(),
            *etc_args(self._etc),
            "--perms",
            "0755",
            "--dir",
            "/.sandbox",
            *python_args,
            "--ro-bind",
            self._context.lib_dir,
            LIB,
        ]
        for path in self._context.config.expose:
            self._common_args += ["--ro-bind", path, path]

    def _namespace_args(self) -> list[str]:
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
        if self._is_root:
            return [*args, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        return [*args, "--unshare-user", "--disable-userns", "--uid", str(_INSIDE_UID), "--gid", str(_INSIDE_UID), "--cap-drop", "ALL"]

    async def start_runtime(
        self,
        slot_id: str,
        has_network: bool,
        reused: SlotRuntime | None = None,
        cache: CacheFolder | None = None,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        """See `Isolation.start_runtime`."""
        self._set_up()
        shell = base.find_shell()  # first, because a failure after the start of init would leave init behind
        uid = reused.uid if reused is not None else self._uids.take_uid() if self._is_root else None
        self._runtime_count += 1
        name = "bwrap-%d" % self._runtime_count
        if reused is not None:
            dirs = reused.dirs
        else:
            dirs = base.make_dirs(os.path.join(self._context.slots_dir, name), uid)
        groups = self._cgroups.make_groups(name)
        try:
            started_init = await self._start_init(has_network, dirs, uid, groups, cache, read_only)
        except BaseException:  # also when this task is cancelled
            groups.remove_groups()
            if reused is None and uid is not None:
                self._uids.give_back_uid(uid)
            raise
        finally:
            groups.close_join_fds()
        return started_init.to_runtime(slot_id, dirs, WORKSPACE, TMP, has_network=has_network, uid=uid, groups=groups, shell=shell, cache=cache)

    async def _start_init(
        self, has_network: bool, dirs: Dirs, uid: int | None, groups: SlotGroups, cache: CacheFolder | None, read_only: Sequence[ReadOnlyEntry]
    ) -> init_start.StartedInit:
        agent_socket, init_socket = init_start.create_control_sockets()
        accounts = write_accounts(dirs.root, uid if uid is not None else _INSIDE_UID, cache.groups if cache is not None else ())
        argv = [self._program, *self._common_args, *accounts]
        if not has_network:
            argv.append("--unshare-net")
        argv += ["--bind", dirs.workspace, WORKSPACE, "--bind", dirs.tmp, TMP, "--dir", "/var", "--bind", dirs.tmp, "/var/tmp", "--dir", "/run"]
        if cache is not None:
            argv += ["--bind", cache.path, CACHE]
        for entry in read_only:  # No process of the slot runs now, and init checks that these are the entries that the agent has examined.
            argv += ["--ro-bind", os.path.join(dirs.workspace, entry.name), os.path.join(WORKSPACE, entry.name)]
        argv += ["--remount-ro", "/", "--chdir", "/"]
        if self._python.startswith(PYTHON):
            argv += ["--setenv", "LD_LIBRARY_PATH", PYTHON + "/lib"]
        argv += ["--", *init_start.init_argv(self._python, LIB, init_socket.fileno())]
        affinity = self._context.affinity(self._runtime_count)
        config = {
            "mode": "bwrap",
            "uid": uid,
            "gid": uid,
            "groups": cache.groups if cache is not None else [],
            "private_mounts": None,
            "umask": cache.umask if cache is not None else base.UMASK,
            "env": self._context.environment(len(affinity), WORKSPACE, None, CACHE if cache is not None else None),
            "home": WORKSPACE,
            "roots": [WORKSPACE, TMP],
            "read_only": [entry.message for entry in read_only],
            "limits": self._context.rlimits(groups.limits_memory, groups.limits_processes),
            "affinity": affinity,
            "lib": LIB,
            "filter": self._context.filter,
        }
        kill_rest = functools.partial(kill_bwrap_processes, dirs.root)
        return await init_start.start_init(argv, init_socket, agent_socket, config, groups.join_fds, sets_floor=self._context.sets_floor, kill_rest=kill_rest)

    async def end_runtime(self, runtime: SlotRuntime) -> dict[str, Any]:
        """See `Isolation.end_runtime`. When the first process of a pid namespace has been reaped, the kernel has killed all others in it."""
        runtime.link.close_link()
        if runtime.init_pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
            try:
                signal.pidfd_send_signal(runtime.init_pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # It has ended by itself.
        else:
            runtime.process.kill()
        ended = await init_start.wait_for_exit(runtime.process, base.END_TIMEOUT_S)
        if ended and runtime.init_pidfd >= 0:
            ended = await wait_readable(runtime.init_pidfd, base.END_TIMEOUT_S)
        proof: dict[str, Any] = {"namespace_ended": ended, "clean": ended}
        if not ended:
            proof["detail"] = "init %d did not end within %g s of SIGKILL" % (runtime.init_pid, base.END_TIMEOUT_S)
            return proof
        mounts = procfs.mounts_under(runtime.dirs.root)
        proof["mounts"] = len(mounts)
        if mounts:
            proof.update(clean=False, detail="%s is still mounted" % mounts[0])
        init_start.close_runtime_fds(runtime)
        runtime.groups.remove_groups()
        return proof

    def free_uid(self, runtime: SlotRuntime) -> None:
        """See `Isolation.free_uid`."""
        if runtime.uid is not None:
            self._uids.give_back_uid(runtime.uid)

    def remove_mode_files(self) -> None:
        """See `Isolation.remove_mode_files`. Everything that the mode creates lies in the folder of the agent."""


def _system_args() -> list[str]:
    """Return the arguments that mount the programs and libraries of the machine read-only, and the file systems of the kernel."""
    args = ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM_LINKS:
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            args += ["--ro-bind", path, path]
    args += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(base.SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    return args


def _python_args() -> tuple[str, list[str]]:
    """Return how the interpreter of init is mounted: at a private path without site packages, unless it is installed below /usr.

    Returns:
        The path of the interpreter inside the slot, and the arguments of bubblewrap that mount it.
    """
    program = base.interpreter()
    if program.startswith("/usr/"):
        return program, []
    standard = os.path.dirname(os.path.realpath(os.__file__))
    name = os.path.basename(standard)
    args = []
    for folder in (PYTHON, PYTHON + "/bin", PYTHON + "/lib"):
        args += ["--perms", "0755", "--dir", folder]
    args += ["--ro-bind", program, "%s/bin/%s" % (PYTHON, os.path.basename(program)), "--ro-bind", standard, "%s/lib/%s" % (PYTHON, name)]
    if os.path.isdir(os.path.join(standard, "site-packages")):
        args += ["--tmpfs", "%s/lib/%s/site-packages" % (PYTHON, name), "--remount-ro", "%s/lib/%s/site-packages" % (PYTHON, name)]
    shared = sysconfig.get_config_var("INSTSONAME")
    folder = os.path.dirname(standard)
    if shared and sysconfig.get_config_var("Py_ENABLE_SHARED") and os.path.exists(os.path.join(folder, shared)):
        args += ["--ro-bind", os.path.realpath(os.path.join(folder, shared)), "%s/lib/%s" % (PYTHON, shared)]
    return "%s/bin/%s" % (PYTHON, os.path.basename(program)), args

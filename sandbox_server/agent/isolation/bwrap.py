"""Slots in namespaces of their own, by bubblewrap. As root without a user namespace (init drops to the slot's uid), else with one."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import sysconfig
from typing import Any

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.processes.descriptor_waits import wait_readable
from sandbox_server.agent.execution.slot_runtime import CacheFolder, Dirs, SlotRuntime
from sandbox_server.agent.isolation import base
from sandbox_server.agent.isolation.bwrap_processes import kill_bwrap_processes
from sandbox_server.agent.isolation.etc import etc_args, write_accounts, write_etc
from sandbox_server.agent.kernel import procfs
from sandbox_server.agent.kernel.cgroups import Cgroups, Groups
from sandbox_server.agent.kernel.uids import UidRange

WORKSPACE = "/workspace"
TMP = "/tmp"
CACHE = "/cache"
LIB = "/.sandbox/lib"
PYTHON = "/.sandbox/python"
_INSIDE_UID = 1000
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


class Bwrap:
    """The mode `bwrap`."""

    name = "bwrap"
    places = "own"
    networks: tuple[str, ...] = ("none", "shared")
    caches = True

    def __init__(self, context: base.Context, cgroups: Cgroups, uids: UidRange) -> None:
        self._context = context
        self._cgroups = cgroups
        self._uids = uids
        self._root = os.geteuid() == 0
        self._generation = 0
        self._etc = os.path.join(context.config.base_dir, "etc")
        self._program = ""
        self._fixed: list[str] = []
        self._python = ""

    def _set_up(self) -> None:
        """Everything that is the same for every slot, once."""
        if self._fixed:
            return
        program = shutil.which("bwrap")
        if program is None:
            raise StartFailed("bubblewrap (bwrap) is not in PATH")
        self._program = program
        write_etc(self._etc)
        self._python, python_args = _python_args()
        self._fixed = [
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
            self._fixed += ["--ro-bind", path, path]

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
        if self._root:
            return [*args, "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP"]
        return [*args, "--unshare-user", "--disable-userns", "--uid", str(_INSIDE_UID), "--gid", str(_INSIDE_UID), "--cap-drop", "ALL"]

    async def start(self, slot_id: str, network: bool, keep: SlotRuntime | None = None, cache: CacheFolder | None = None) -> SlotRuntime:
        """See `Isolation.start`."""
        self._set_up()
        uid = keep.uid if keep is not None else self._uids.take() if self._root else None
        self._generation += 1
        name = "bwrap-%d" % self._generation
        if keep is not None:
            dirs = keep.dirs
        else:
            dirs = base.make_dirs(os.path.join(self._context.slots_dir, name), uid)
        groups = self._cgroups.make_groups(name)
        try:
            launched = await self._launch(network, dirs, uid, groups, cache)
        except BaseException:
            groups.remove()
            if keep is None and uid is not None:
                self._uids.give_back(uid)
            raise
        finally:
            groups.close_join_fds()
        return SlotRuntime(
            slot_id=slot_id,
            dirs=dirs,
            workspace=WORKSPACE,
            tmp=TMP,
            network=network,
            process=launched.process,
            link=launched.link,
            init_pid=launched.pid,
            init_pidfd=launched.pidfd,
            uid=uid,
            groups=groups,
            shell=base.find_shell(),
            stderr_fd=launched.stderr_fd,
            cache=cache,
        )

    async def _launch(self, network: bool, dirs: Dirs, uid: int | None, groups: Groups, cache: CacheFolder | None) -> base.Launched:
        ours, theirs = base.control_pair()
        accounts = write_accounts(dirs.root, uid if uid is not None else _INSIDE_UID, cache.groups if cache is not None else ())
        argv = [self._program, *self._fixed, *accounts]
        if not network:
            argv.append("--unshare-net")
        argv += ["--bind", dirs.workspace, WORKSPACE, "--bind", dirs.tmp, TMP, "--dir", "/var", "--bind", dirs.tmp, "/var/tmp", "--dir", "/run"]
        if cache is not None:
            argv += ["--bind", cache.path, CACHE]
        argv += ["--remount-ro", "/", "--chdir", "/"]
        if self._python.startswith(PYTHON):
            argv += ["--setenv", "LD_LIBRARY_PATH", PYTHON + "/lib"]
        argv += ["--", *base.init_argv(self._python, LIB, theirs.fileno())]
        affinity = self._context.affinity(self._generation)
        config = {
            "mode": "bwrap",
            "uid": uid,
            "gid": uid,
            "groups": cache.groups if cache is not None else [],
            "places": None,
            "umask": cache.umask if cache is not None else base.UMASK,
            "env": self._context.environment(len(affinity), WORKSPACE, None, CACHE if cache is not None else None),
            "home": WORKSPACE,
            "roots": [WORKSPACE, TMP],
            "limits": self._context.rlimits(groups.memory, groups.processes),
            "affinity": affinity,
            "lib": LIB,
            "filter": self._context.filter,
        }
        kill_rest = functools.partial(kill_bwrap_processes, dirs.root)
        return await base.launch(argv, theirs, ours, config, groups.join_fds, sets_floor=self._context.sets_floor, kill_rest=kill_rest)

    async def end(self, body: SlotRuntime) -> dict[str, Any]:
        """See `Isolation.end`. When the first process of a pid namespace has been reaped, the kernel has ended every other one in it."""
        body.link.close()
        if body.init_pidfd >= 0 and hasattr(signal, "pidfd_send_signal"):
            try:
                signal.pidfd_send_signal(body.init_pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it has ended by itself
        else:
            body.process.kill()
        ended = await base.wait_exit(body.process, base.END_TIMEOUT_S)
        if ended and body.init_pidfd >= 0:
            ended = await wait_readable(body.init_pidfd, base.END_TIMEOUT_S)
        proof: dict[str, Any] = {"namespace_ended": ended, "clean": ended}
        if not ended:
            proof["detail"] = "init %d did not end within %g s of SIGKILL" % (body.init_pid, base.END_TIMEOUT_S)
            return proof
        mounts = procfs.mounts_under(body.dirs.root)
        proof["mounts"] = len(mounts)
        if mounts:
            proof.update(clean=False, detail="%s is still mounted" % mounts[0])
        base.close_body_fds(body)
        body.groups.remove()
        return proof

    def forget(self, body: SlotRuntime) -> None:
        """See `Isolation.forget`."""
        if body.uid is not None:
            self._uids.give_back(body.uid)

    def close(self) -> None:
        """See `Isolation.close`: everything is in the agent's own folder."""


def _system_args() -> list[str]:
    """The machine's programs and libraries, read-only, and the kernel's file systems."""
    args = ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM_LINKS:
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            args += ["--ro-bind", path, path]
    args += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(base.SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    return args


def _python_args() -> tuple[str, list[str]]:
    """Init's own interpreter at a private path, without anybody's site packages, unless it is part of the system.

    Returns:
        Its path inside the slot, and the arguments that put it there.
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

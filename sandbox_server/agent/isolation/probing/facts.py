"""What decides whether an isolation mode works: the machine since it was started, the rights of this agent, the programs it uses, and its configuration.

A result that was found under the same facts is not probed again. So the facts rather contain too much than too little.
"""

from __future__ import annotations

import dataclasses
import os
import pkgutil
import shutil
from typing import Any, Mapping, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.isolation import base
from sandbox_server.agent.isolation.shared_folders import SHARED_FOLDERS
from sandbox_server.agent.kernel import procfs

_AGENT = "sandbox_server.agent"
_BUILD_DIGEST = "build_digest.txt"  # See `agent.build`.
_STATUS_FIELDS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
_NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_KERNEL_FILES = (
    "/proc/sys/kernel/random/boot_id",
    "/proc/sys/kernel/unprivileged_userns_clone",
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
    "/proc/sys/user/max_cgroup_namespaces",
    "/proc/sys/user/max_ipc_namespaces",
    "/proc/sys/user/max_mnt_namespaces",
    "/proc/sys/user/max_net_namespaces",
    "/proc/sys/user/max_pid_namespaces",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/user/max_uts_namespaces",
    "/proc/self/attr/current",
    "/proc/self/uid_map",
    "/proc/self/mountinfo",
)


def collect_facts(context: base.IsolationContext) -> dict[str, Any] | None:
    """Return the facts, as JSON values. None if this agent does not know which build it is, so that nothing that it finds may be kept.

    Args:
        context: the settings of the agent.
    """
    try:
        build = pkgutil.get_data(_AGENT, _BUILD_DIGEST)
    except OSError:
        return None  # The agent runs from a source tree, which can change at any time.
    if build is None:
        return None
    status = procfs.status_fields(os.getpid())
    return {
        "build": build.decode("ascii"),
        "system": list(os.uname()),
        "kernel": {path: _read(path) for path in _KERNEL_FILES},
        "rights": {name: status.get(name) for name in _STATUS_FIELDS},
        "namespaces": {name: os.readlink("/proc/self/ns/" + name) for name in _NAMESPACES},
        "programs": {path: _describe_file(path) for path in _list_programs()},
        "library_path": os.environ.get("LD_LIBRARY_PATH", ""),
        "sets_floor": context.sets_floor,
        "config": _describe_config(context),
    }


def _list_programs() -> Sequence[str]:
    try:
        shell = base.find_shell()
    except StartFailed:
        shell = ""
    return (base.interpreter(), os.path.realpath(os.__file__), shutil.which("bwrap") or "", shell)


def _describe_config(context: base.IsolationContext) -> Mapping[str, Any]:
    config = context.config
    return {
        "slot_start": config.slot_start,
        "network": config.network,
        "limits": dataclasses.asdict(config.limits),
        "expose": {path: _describe_file(path) for path in config.expose},
        "workspace_base": _describe_folders(config.workspace_base),
    }


def _describe_folders(path: str) -> list[Any]:
    """Describe the existing ones of a folder and its parents by who can pass and change them. Two agents have different folders with the same properties."""
    found: list[Any] = [[folder for folder in SHARED_FOLDERS if (os.path.realpath(path) + "/").startswith(os.path.realpath(folder) + "/")]]
    while True:
        try:
            info = os.lstat(path)
            found.append([info.st_dev, info.st_mode, info.st_uid, os.statvfs(path).f_flag])
        except OSError as error:
            found.append(error.errno)
        if path == os.path.dirname(path):
            return found
        path = os.path.dirname(path)


def _describe_file(path: str) -> list[int] | int | None:
    try:
        info = os.stat(path)
    except OSError as error:
        return error.errno
    return [info.st_dev, info.st_ino, info.st_mode, info.st_uid, info.st_size, info.st_mtime_ns, info.st_ctime_ns]


def _read(path: str) -> str | int | None:
    try:
        with open(path, encoding="utf-8", errors="backslashreplace") as file:
            return file.read()
    except OSError as error:
        return error.errno

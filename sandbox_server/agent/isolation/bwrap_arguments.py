"""The arguments of bubblewrap for the file systems of slots: what every slot of an agent sees of the machine, read-only."""

from __future__ import annotations

import os
import sysconfig
from typing import Sequence

from sandbox_server.agent.isolation import base
from sandbox_server.agent.isolation.etc_folder import etc_args

WORKSPACE = "/workspace"
TMP = "/tmp"
CACHE = "/cache"
LIB = "/.sandbox/lib"
PYTHON = "/.sandbox/python"
SHM_OPTIONS = "mode=1777,size=%d" % base.SHM_BYTES
_SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")


def machine_args(etc: str, lib_dir: str, expose: Sequence[str], shm: bool) -> tuple[str, list[str]]:
    """Return the arguments that mount what all slots of an agent share.

    Args:
        etc: the folder that is mounted as /etc.
        lib_dir: the folder with the code of init.
        expose: folders of the machine that slots can read.
        shm: whether /dev/shm is mounted.

    Returns:
        The path of the interpreter of init inside the slot, and the arguments.
    """
    python, python_args = _python_args()
    args = [*_system_args(shm), *etc_args(etc), "--perms", "0755", "--dir", "/.sandbox", *python_args, "--ro-bind", lib_dir, LIB]
    for path in expose:
        args += ["--ro-bind", path, path]
    return python, args


def library_path(python: str) -> str:
    """Return the LD_LIBRARY_PATH that the interpreter of init needs inside the slot; empty for none."""
    return PYTHON + "/lib" if python.startswith(PYTHON) else ""


def _system_args(shm: bool) -> list[str]:
    """Return the arguments that mount the programs and libraries of the machine read-only, and the file systems of the kernel."""
    args = ["--ro-bind", "/usr", "/usr"]
    for path in _SYSTEM_LINKS:
        if os.path.islink(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            args += ["--ro-bind", path, path]
    args += ["--proc", "/proc", "--dev", "/dev"]
    if shm:
        args += ["--perms", "1777", "--size", str(base.SHM_BYTES), "--tmpfs", "/dev/shm"]
    return [*args, "--remount-ro", "/dev"]


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

"""Gives the network process a user namespace, so that it has rights over the networks that it makes and over nothing else of the machine."""

from __future__ import annotations

import errno
import os
import socket
import stat

from sandbox_server.agent.init import private_mounts, privileges
from sandbox_server.agent.template import system_calls

_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_BIND, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x1000, 1 << 18
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 4, 8
_TUN_FOLDER, _TUN = "/dev/net", "/dev/net/tun"
_TUN_DEVICE = os.makedev(10, 200)
#: Where the network process keeps the network namespace of the router, in mounts of its own.
_PRIVATE_FOLDER = "/tmp"
NAMESPACE_PATH = _PRIVATE_FOLDER + "/router"


def enter_user_namespace(uid: int | None) -> None:
    """Move this process into a new user namespace, in which it is root, and into mounts of its own. Its next children are in a new process namespace.

    Args:
        uid: the user on the machine that this process becomes, if it is root there; None if it stays the user that it is.

    Raises:
        OSError: the machine does not permit it, or lacks something. The text says what.
    """
    if uid is not None:
        _become_user(uid)
    uid, gid = os.getuid(), os.getgid()
    namespaces = system_calls.CLONE_NEWUSER | system_calls.CLONE_NEWNS | system_calls.CLONE_NEWPID
    try:
        system_calls.unshare(namespaces)
        for name, text in (("setgroups", "deny"), ("uid_map", "0 %d 1" % uid), ("gid_map", "0 %d 1" % gid)):
            with open("/proc/self/" + name, "w", encoding="ascii") as file:
                file.write(text)
    except OSError as error:
        raise OSError(error.errno, "a user namespace cannot be made here: %s" % error.strerror) from None
    privileges.make_undumpable()
    private_mounts.mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    private_mounts.mount("tmpfs", _PRIVATE_FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "mode=755,size=65536")


def _become_user(uid: int) -> None:
    """Become another user and keep the right to make namespaces. The device of the uplink stays open to this user."""
    if not os.path.isdir(_TUN_FOLDER):
        raise OSError(errno.ENOENT, "%s is missing: the kernel has no tun devices here, or the container gets none" % _TUN)
    system_calls.unshare(system_calls.CLONE_NEWNS)
    private_mounts.mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    private_mounts.mount("tmpfs", _TUN_FOLDER, "tmpfs", _MS_NOSUID | _MS_NOEXEC, "mode=755,size=4096")
    try:
        os.mknod(_TUN, stat.S_IFCHR | 0o666, _TUN_DEVICE)
    except OSError as error:
        raise OSError(error.errno, "%s cannot be made: %s" % (_TUN, error.strerror)) from None
    os.chmod(_TUN, 0o666)  # whatever the umask is
    privileges.set_process_flag(_PR_SET_KEEPCAPS, 1)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    privileges.set_capabilities(privileges.CAP_SYS_ADMIN)
    privileges.set_process_flag(_PR_SET_DUMPABLE, 1)  # so that the files of this process in /proc, with the maps of users, belong to it


def keep_namespace(namespace_fd: int) -> None:
    """Give a network namespace the path `NAMESPACE_PATH`, in the mounts of this process alone."""
    os.close(os.open(NAMESPACE_PATH, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
    private_mounts.mount("/proc/self/fd/%d" % namespace_fd, NAMESPACE_PATH, None, _MS_BIND)


def fork_router() -> tuple[int, socket.socket]:
    """Fork the first process of the new process namespace, and return its process id, or 0 in it, and the end of a socket to the other one."""
    own, routers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    (own if pid == 0 else routers).close()
    return pid, routers if pid == 0 else own

"""System calls that the C library has no function for, or that Python has none for in every version.

The numbers of system calls that are newer than Linux 5.1 are the same on every processor. The module imports little, because every slot needs memory for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from sandbox_server.agent.init.c_library import libc

CLONE_PARENT, CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x8000, 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MOVE_MOUNT, _CLONE3, _CLOSE_RANGE = 429, 435, 436
#: The number of keyctl, which the C library has no function for.
_KEYCTL = {"x86_64": 250, "aarch64": 219}.get(os.uname().machine)
_KEYCTL_JOIN_SESSION_KEYRING = 1
_CLONE_ARGUMENTS = struct.Struct("8Q")  # flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls
_FROM_DESCRIPTOR, _TO_DESCRIPTOR = 0x04, 0x40
_AT_FDCWD = 0xFFFFFFFF & -100  # without its sign, which ctypes finds only after it has raised and caught an error
_PR_SET_NAME = 15
_LAST_FD = 0x7FFFFFFF
_SIOCSIFFLAGS, _SIOCGSKNS, _IFF_UP = 0x8914, 0x894C, 1

_INTERFACE_REQUEST = struct.Struct("16sH22x")  # The name of the interface, and its flags.

#: The same library, called without releasing the lock of the interpreter, as `os.fork` calls fork.
_locked_libc = ctypes.PyDLL(None, use_errno=True)
#: Found now, as in `c_library`.
_locked_syscall = _locked_libc.syscall
_before_fork, _after_fork_in_child = ctypes.pythonapi.PyOS_BeforeFork, ctypes.pythonapi.PyOS_AfterFork_Child
_after_fork_in_parent = ctypes.pythonapi.PyOS_AfterFork_Parent


def check(subject: str, result: int) -> int:
    """Return the result of a system call.

    Raises:
        OSError: the result is negative; the text begins with `subject`.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (subject, os.strerror(number)))
    return result


def fork_sibling(namespaces: int) -> int:
    """Fork a process whose parent is the parent of this process. This process must have one thread.

    Args:
        namespaces: the `CLONE_NEW*` flags of the namespaces that the new process gets of its own.

    Returns:
        The process id of the new process as this process sees it; 0 in the new process.

    Raises:
        OSError: the kernel has refused the call.
    """
    arguments = _CLONE_ARGUMENTS.pack(namespaces | CLONE_PARENT, 0, 0, 0, 0, 0, 0, 0)
    # What `os.fork` does before and after the system call.
    _before_fork()
    pid = int(_locked_syscall(_CLONE3, arguments, len(arguments)))
    number = ctypes.get_errno()
    if pid == 0:
        _after_fork_in_child()
    else:
        _after_fork_in_parent()
    if pid < 0:
        raise OSError(number, "clone3: %s" % os.strerror(number))
    return pid


def unshare(namespaces: int) -> None:
    """Move this process into new namespaces."""
    check("unshare", libc.unshare(namespaces))


def join_namespace(fd: int, kind: int) -> None:
    """Move this process into the namespace of a descriptor of `/proc/PID/ns/*`; `kind` is its `CLONE_NEW*` flag."""
    check("setns", libc.setns(fd, kind))


def attach_mount(mount_fd: int, target: str, target_fd: int = _AT_FDCWD) -> None:
    """Attach a detached mount.

    Args:
        mount_fd: the descriptor of the mount.
        target: the path of the mount point; empty if `target_fd` is the mount point itself.
        target_fd: a descriptor of the mount point.
    """
    flags = _FROM_DESCRIPTOR | (0 if target else _TO_DESCRIPTOR)
    result = libc.syscall(_MOVE_MOUNT, mount_fd, b"", target_fd, target.encode("utf-8", "surrogateescape"), flags)
    check("move_mount on %s" % (target or "an entry"), result)


def close_from(first_fd: int) -> None:
    """Close all descriptors from this one on."""
    check("close_range", libc.syscall(_CLOSE_RANGE, first_fd, _LAST_FD, 0))


def join_new_session_keyring(needs_new: bool) -> None:
    """Give this process a session keyring of its own, if the kernel has keyrings and the sandbox lets them be used. Slots may not use keyrings at all.

    Args:
        needs_new: whether it is an error if the user has no room for another one. The kernel permits an ordinary user few, so otherwise the process keeps the
            one that it has.

    Raises:
        OSError: the kernel has refused it.
    """
    if _KEYCTL is None:
        return
    accepted = (errno.ENOSYS, errno.EPERM) if needs_new else (errno.ENOSYS, errno.EPERM, errno.EDQUOT)
    if libc.syscall(_KEYCTL, _KEYCTL_JOIN_SESSION_KEYRING, None) < 0 and ctypes.get_errno() not in accepted:
        check("keyctl", -1)


def set_file_uid(uid: int) -> None:
    """Get the file permissions of a user, and keep all capabilities that do not concern files.

    Raises:
        OSError: the kernel has refused it.
    """
    libc.setfsuid(uid)
    if libc.setfsuid(-1) != uid:  # The call reports no errors: it returns the previous value.
        raise OSError(errno.EPERM, "setfsuid: %s" % os.strerror(errno.EPERM))


def set_host_name(name: bytes) -> None:
    """Set the host name of this UTS namespace."""
    check("sethostname", libc.sethostname(name, len(name)))


def set_process_name(name: bytes) -> None:
    """Set the name of this process as `ps` shows it, of at most 15 bytes."""
    check("prctl", libc.prctl(_PR_SET_NAME, name, 0, 0, 0))


def unmount(target: str) -> None:
    """Detach the mount on a path, and all mounts below it."""
    check("umount of %s" % target, libc.umount2(os.fsencode(target), 2))


def open_network_of(socket_fd: int) -> int:
    """Return a descriptor of the network namespace that a socket belongs to. It is closed when a program is executed. This needs rights over the namespace."""
    return check("the network namespace of a socket", libc.ioctl(socket_fd, _SIOCGSKNS, None))


def start_loopback(socket_fd: int) -> None:
    """Start the loopback interface of this network namespace. The kernel then gives it its addresses.

    Args:
        socket_fd: any internet socket in this network namespace.
    """
    # A new interface has no other flags that can be set.
    check("starting lo", libc.ioctl(socket_fd, _SIOCSIFFLAGS, _INTERFACE_REQUEST.pack(b"lo", _IFF_UP)))

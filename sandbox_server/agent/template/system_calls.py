"""System calls that the C library has no function for, or that Python has none for in every version.

The numbers of system calls that are newer than Linux 5.1 are the same on every processor. The module imports little, because every slot needs memory for it.
"""

from __future__ import annotations

import ctypes
import errno
import os

CLONE_PARENT, CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x8000, 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
_MOVE_MOUNT, _CLONE3, _CLOSE_RANGE = 429, 435, 436
#: The number of keyctl, which the C library has no function for.
_KEYCTL = {"x86_64": 250, "aarch64": 219}
_KEYCTL_JOIN_SESSION_KEYRING = 1
_CLONE_ARGS = 8  # Numbers of 64 bits: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls.
_FROM_DESCRIPTOR, _TO_DESCRIPTOR = 0x04, 0x40
_AT_FDCWD = -100
_PR_SET_NAME = 15
_LAST_FD = 0xFFFFFFFF
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _SIOCGSKNS, _IFF_UP = 0x8913, 0x8914, 0x894C, 1

_CloneArguments = ctypes.c_uint64 * _CLONE_ARGS
_InterfaceRequest = ctypes.c_char * 40
_Flags = ctypes.POINTER(ctypes.c_short)

_libc = ctypes.CDLL(None, use_errno=True)
#: The same library, called without releasing the lock of the interpreter, as `os.fork` calls fork.
_locked_libc = ctypes.PyDLL(None, use_errno=True)


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
    arguments = _CloneArguments(namespaces | CLONE_PARENT)
    # What `os.fork` does before and after the system call.
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_locked_libc.syscall(ctypes.c_long(_CLONE3), arguments, ctypes.c_size_t(ctypes.sizeof(arguments))))
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, "clone3: %s" % os.strerror(number))
    return pid


def unshare(namespaces: int) -> None:
    """Move this process into new namespaces."""
    check("unshare", _libc.unshare(ctypes.c_int(namespaces)))


def join_namespace(fd: int, kind: int) -> None:
    """Move this process into the namespace of a descriptor of `/proc/PID/ns/*`; `kind` is its `CLONE_NEW*` flag."""
    check("setns", _libc.setns(ctypes.c_int(fd), ctypes.c_int(kind)))


def attach_mount(mount_fd: int, target: str, target_fd: int = _AT_FDCWD) -> None:
    """Attach a detached mount.

    Args:
        mount_fd: the descriptor of the mount.
        target: the path of the mount point; empty if `target_fd` is the mount point itself.
        target_fd: a descriptor of the mount point.
    """
    flags = _FROM_DESCRIPTOR | (0 if target else _TO_DESCRIPTOR)
    arguments = (ctypes.c_int(mount_fd), b"", ctypes.c_int(target_fd), os.fsencode(target), ctypes.c_uint(flags))
    check("move_mount on %s" % (target or "an entry"), _libc.syscall(ctypes.c_long(_MOVE_MOUNT), *arguments))


def close_from(first_fd: int) -> None:
    """Close all descriptors from this one on."""
    check("close_range", _libc.syscall(ctypes.c_long(_CLOSE_RANGE), ctypes.c_uint(first_fd), ctypes.c_uint(_LAST_FD), ctypes.c_uint(0)))


def join_new_session_keyring(needs_new: bool) -> None:
    """Give this process a session keyring of its own, if the kernel has keyrings and the sandbox lets them be used. Slots may not use keyrings at all.

    Args:
        needs_new: whether it is an error if the user has no room for another one. The kernel permits an ordinary user few, so otherwise the process keeps the
            one that it has.

    Raises:
        OSError: the kernel has refused it.
    """
    number = _KEYCTL.get(os.uname().machine)
    if number is None:
        return
    accepted = (errno.ENOSYS, errno.EPERM) if needs_new else (errno.ENOSYS, errno.EPERM, errno.EDQUOT)
    if _libc.syscall(ctypes.c_long(number), ctypes.c_int(_KEYCTL_JOIN_SESSION_KEYRING), None) < 0 and ctypes.get_errno() not in accepted:
        check("keyctl", -1)


def set_file_uid(uid: int) -> None:
    """Get the file permissions of a user, and keep all capabilities that do not concern files.

    Raises:
        OSError: the kernel has refused it.
    """
    _libc.setfsuid(ctypes.c_uint(uid))
    if _libc.setfsuid(ctypes.c_uint(0xFFFFFFFF)) != uid:  # The call reports no errors: it returns the previous value.
        raise OSError(errno.EPERM, "setfsuid: %s" % os.strerror(errno.EPERM))


def set_host_name(name: bytes) -> None:
    """Set the host name of this UTS namespace."""
    check("sethostname", _libc.sethostname(name, ctypes.c_size_t(len(name))))


def set_process_name(name: bytes) -> None:
    """Set the name of this process as `ps` shows it, of at most 15 bytes."""
    check("prctl", _libc.prctl(ctypes.c_int(_PR_SET_NAME), ctypes.c_char_p(name), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def unmount(target: str) -> None:
    """Detach the mount on a path, and all mounts below it."""
    check("umount of %s" % target, _libc.umount2(os.fsencode(target), ctypes.c_int(2)))


def open_network_of(socket_fd: int) -> int:
    """Return a descriptor of the network namespace that a socket belongs to. It is closed when a program is executed. This needs rights over the namespace."""
    return check("the network namespace of a socket", _libc.ioctl(ctypes.c_int(socket_fd), ctypes.c_ulong(_SIOCGSKNS), None))


def start_loopback(socket_fd: int) -> None:
    """Start the loopback interface of this network namespace. The kernel then gives it its addresses.

    Args:
        socket_fd: any internet socket in this network namespace.
    """
    request = _InterfaceRequest()
    request.value = b"lo"
    check("the flags of lo", _libc.ioctl(ctypes.c_int(socket_fd), ctypes.c_ulong(_SIOCGIFFLAGS), request))
    flags = ctypes.cast(ctypes.addressof(request) + 16, _Flags)
    flags[0] |= _IFF_UP
    check("starting lo", _libc.ioctl(ctypes.c_int(socket_fd), ctypes.c_ulong(_SIOCSIFFLAGS), request))

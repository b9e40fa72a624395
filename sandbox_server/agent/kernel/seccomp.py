"""Builds the BPF program that refuses system calls of the processes of a slot. Init installs it.

Without capabilities, the refused calls give a process no additional rights. They are refused because most privilege escalation bugs of the kernel are in them
(namespaces, mounts, keys, bpf, io_uring), or because they affect other processes of the same user (terminal injection, resource limits of init).
"""

import errno
import struct
from typing import Dict, List, NamedTuple, Tuple

_LD_W_ABS, _JEQ, _JGE, _JSET, _RET = 0x20, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000

_CLONE_NEW = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C
#: Address families that network namespaces isolate: unix, IPv4, IPv6, netlink. Others, such as vsock, can reach the machine from every slot.
_FAMILIES = (1, 2, 10, 16)
_INIT = 1  # The pid of init if the slot has a pid namespace. Without one, init has another uid and cannot be affected.
_PRIO_USER, _IOPRIO_WHO_USER = 2, 3


class UnknownMachine(Exception):
    """There is no system call filter for the processor of this machine."""


class _Machine(NamedTuple):
    audit_arch: int
    refused: Tuple[int, ...]
    namespaces: Tuple[int, ...]  # The first argument contains CLONE_NEW* flags.
    clone3: int
    ioctl: int
    prlimit: int
    mq_open: int
    io_setup: int  # Its resources are limited for the whole machine (fs.aio-max-nr), and one slot could use all of them.
    sockets: Tuple[int, int]  # socket and socketpair.
    schedules: Tuple[int, ...]  # sched_setscheduler, sched_setparam, sched_setaffinity, sched_setattr. The first argument is a process.
    setpriority: int
    ioprio_set: int
    foreign_from: int  # Numbers from here on belong to another calling convention; 0 if there is none.


# unshare, setns, mount, umount2, pivot_root, swapon, swapoff, reboot, sethostname, setdomainname, init_module, delete_module, finit_module, kexec_load,
# kexec_file_load, bpf, perf_event_open, userfaultfd, keyctl, add_key, request_key, open_by_handle_at, quotactl, acct, syslog, and the numbers all machines
# share: io_uring_setup/enter/register, open_tree, move_mount, fsopen, fsconfig, fsmount, fspick, mount_setattr, quotactl_fd.
_COMMON = (425, 426, 427, 428, 429, 430, 431, 432, 433, 442, 443)
_MACHINES: Dict[str, _Machine] = {
    "x86_64": _Machine(
        0xC000003E,
        (308, 165, 166, 155, 167, 168, 169, 170, 171, 175, 176, 313, 246, 320, 321, 298, 323, 250, 248, 249, 304, 179, 163, 103, *_COMMON),
        (56, 272),
        435,
        16,
        302,
        240,
        206,
        (41, 53),
        (144, 142, 203, 314),
        141,
        251,
        0x40000000,
    ),
    "aarch64": _Machine(
        0xC00000B7,
        (268, 40, 39, 41, 224, 225, 142, 161, 162, 105, 106, 273, 104, 294, 280, 241, 282, 219, 217, 218, 265, 60, 89, 116, *_COMMON),
        (220, 97),
        435,
        29,
        261,
        180,
        0,
        (198, 199),
        (119, 118, 122, 274),
        140,
        30,
        0,
    ),
}


def _op(code: int, k: int, jt: int = 0, jf: int = 0) -> bytes:
    return struct.pack("<HBBI", code, jt, jf, k)


def _refuse(number: int) -> bytes:
    return _op(_RET, _ERRNO | number)


def _allow_only_families(number: int) -> List[bytes]:
    count = len(_FAMILIES)
    known = [_op(_JEQ, family, count - at, 0) for at, family in enumerate(_FAMILIES)]
    return [_op(_JEQ, number, 0, count + 3), _op(_LD_W_ABS, _ARGS), *known, _refuse(errno.EAFNOSUPPORT), _op(_RET, _ALLOW)]


def _refuse_on_init(number: int) -> List[bytes]:
    return [_op(_JEQ, number, 0, 4), _op(_LD_W_ABS, _ARGS), _op(_JEQ, _INIT, 0, 1), _refuse(errno.EPERM), _op(_RET, _ALLOW)]


def _refuse_on_init_or_user(number: int, user: int) -> List[bytes]:
    """Refuse calls that affect init. Their first argument says whether the second is a process, a process group or a user, whose processes include init."""
    which = [_op(_LD_W_ABS, _ARGS), _op(_JEQ, user, 2, 0)]
    who = [_op(_LD_W_ABS, _ARGS + 8), _op(_JEQ, _INIT, 0, 1)]
    return [_op(_JEQ, number, 0, 6), *which, *who, _refuse(errno.EPERM), _op(_RET, _ALLOW)]


def build_filter(machine: str, allow_message_queues: bool = True) -> bytes:
    """Build the filter for a machine.

    Args:
        machine: the machine type, as in `os.uname().machine`.
        allow_message_queues: whether POSIX message queues may be created. They must not be if slots share them and /dev/mqueue is not mounted, because then
            the queues of an ended slot could not be found.

    Returns:
        An array of `struct sock_filter`.

    Raises:
        UnknownMachine: there is no filter for this machine type.
    """
    known = _MACHINES.get(machine)
    if known is None:
        raise UnknownMachine("no system call filter for the processor %s, only for %s" % (machine, ", ".join(sorted(_MACHINES))))
    instructions: List[bytes] = [_op(_LD_W_ABS, _ARCH), _op(_JEQ, known.audit_arch, 1, 0), _refuse(errno.ENOSYS), _op(_LD_W_ABS, _NR)]
    if known.foreign_from:
        instructions += [_op(_JGE, known.foreign_from, 0, 1), _refuse(errno.ENOSYS)]
    # The filter cannot read the flags of clone3. With ENOSYS, glibc uses clone instead, whose flags it can read.
    instructions += [_op(_JEQ, known.clone3, 0, 1), _refuse(errno.ENOSYS)]
    for number in known.refused:
        instructions += [_op(_JEQ, number, 0, 1), _refuse(errno.EPERM)]
    instructions += [_op(_JEQ, known.io_setup, 0, 1), _refuse(errno.ENOSYS)]  # As on a kernel without the call: programs then use another method.
    if not allow_message_queues:
        instructions += [_op(_JEQ, known.mq_open, 0, 1), _refuse(errno.ENOSYS)]
    instructions += _refuse_by_argument(known)
    instructions.append(_op(_RET, _ALLOW))
    return b"".join(instructions)


def _refuse_by_argument(known: _Machine) -> List[bytes]:
    """Refuse the calls that are only refused with certain arguments."""
    allow = _op(_RET, _ALLOW)
    instructions: List[bytes] = []
    for number in known.namespaces:
        instructions += [_op(_JEQ, number, 0, 4), _op(_LD_W_ABS, _ARGS), _op(_JSET, _CLONE_NEW, 0, 1), _refuse(errno.EPERM), allow]
    instructions += [
        _op(_JEQ, known.ioctl, 0, 5),
        _op(_LD_W_ABS, _ARGS + 8),
        _op(_JEQ, _TIOCSTI, 1, 0),
        _op(_JEQ, _TIOCLINUX, 0, 1),
        _refuse(errno.EPERM),
        allow,
    ]
    # prlimit on another process: init has the uid of the slot, and the slot must not set its limits.
    instructions += [_op(_JEQ, known.prlimit, 0, 4), _op(_LD_W_ABS, _ARGS), _op(_JEQ, 0, 1, 0), _refuse(errno.EPERM), allow]
    for number in known.sockets:
        instructions += _allow_only_families(number)
    # Init has the uid of the slot, and a slot that slows down init would delay its own calls.
    for number in known.schedules:
        instructions += _refuse_on_init(number)
    return instructions + _refuse_on_init_or_user(known.setpriority, _PRIO_USER) + _refuse_on_init_or_user(known.ioprio_set, _IOPRIO_WHO_USER)

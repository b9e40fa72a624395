"""The system call filter, run by a small interpreter of its own."""

from __future__ import annotations

import errno
import struct

import pytest

from sandbox_server.agent.kernel.seccomp import UnknownMachine, build_filter

X86, ARM = 0xC000003E, 0xC00000B7
ALLOWED = 0


def _run(code: bytes, arch: int, number: int, *args: int) -> int:
    """The errno a call would get; 0 when it is allowed."""
    data = struct.pack("<IIQ6Q", number, arch, 0, *(list(args) + [0] * 6)[:6])
    ops = list(struct.iter_unpack("<HBBI", code))
    at = accumulator = 0
    while True:
        op, jt, jf, k = ops[at]
        at += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif op == 0x06:
            return k & 0xFFFF if k >> 16 == 5 else ALLOWED
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[op]
            at += jt if holds else jf


@pytest.mark.parametrize(
    ("machine", "arch", "number", "args", "expected"),
    [
        ("x86_64", X86, 0, (), ALLOWED),  # read
        ("x86_64", X86, 101, (), ALLOWED),  # ptrace
        ("x86_64", X86, 56, (17,), ALLOWED),  # clone: fork
        ("x86_64", X86, 56, (0x10000000 | 17,), errno.EPERM),  # clone, a user namespace
        ("x86_64", X86, 272, (0x20000,), errno.EPERM),  # unshare, a mount namespace
        ("x86_64", X86, 272, (0x400,), ALLOWED),  # unshare, the files
        ("x86_64", X86, 308, (), errno.EPERM),  # setns
        ("x86_64", X86, 435, (), errno.ENOSYS),  # clone3
        ("x86_64", X86, 165, (), errno.EPERM),  # mount
        ("x86_64", X86, 321, (), errno.EPERM),  # bpf
        ("x86_64", X86, 425, (), errno.EPERM),  # io_uring_setup
        ("x86_64", X86, 206, (1,), errno.ENOSYS),  # io_setup, counted for the whole machine
        ("x86_64", X86, 16, (0, 0x5412), errno.EPERM),  # ioctl TIOCSTI
        ("x86_64", X86, 16, (0, 0x5413), ALLOWED),  # ioctl TIOCGWINSZ
        ("x86_64", X86, 302, (0, 7), ALLOWED),  # prlimit, its own
        ("x86_64", X86, 302, (1, 7), errno.EPERM),  # prlimit, init's
        ("x86_64", X86, 302, (44, 7), errno.EPERM),
        ("x86_64", X86, 41, (1,), ALLOWED),  # socket, AF_UNIX
        ("x86_64", X86, 41, (2,), ALLOWED),
        ("x86_64", X86, 41, (10,), ALLOWED),
        ("x86_64", X86, 41, (16,), ALLOWED),  # AF_NETLINK
        ("x86_64", X86, 41, (40,), errno.EAFNOSUPPORT),  # AF_VSOCK
        ("x86_64", X86, 41, (38,), errno.EAFNOSUPPORT),  # AF_ALG
        ("x86_64", X86, 41, (0,), errno.EAFNOSUPPORT),
        ("x86_64", X86, 53, (1,), ALLOWED),  # socketpair
        ("x86_64", X86, 53, (40,), errno.EAFNOSUPPORT),
        ("x86_64", X86, 203, (0,), ALLOWED),  # sched_setaffinity, its own
        ("x86_64", X86, 203, (77,), ALLOWED),  # of a thread: this is how pthread_setaffinity_np does it
        ("x86_64", X86, 203, (1,), errno.EPERM),  # of init
        ("x86_64", X86, 144, (1,), errno.EPERM),  # sched_setscheduler
        ("x86_64", X86, 142, (1,), errno.EPERM),  # sched_setparam
        ("x86_64", X86, 314, (1,), errno.EPERM),  # sched_setattr
        ("x86_64", X86, 141, (0, 0, 5), ALLOWED),  # setpriority, its own
        ("x86_64", X86, 141, (0, 9, 5), ALLOWED),
        ("x86_64", X86, 141, (0, 1, 5), errno.EPERM),
        ("x86_64", X86, 141, (1, 1, 5), errno.EPERM),  # a process group
        ("x86_64", X86, 141, (2, 0, 5), errno.EPERM),  # all of the user
        ("x86_64", X86, 251, (1, 0, 5), ALLOWED),  # ioprio_set
        ("x86_64", X86, 251, (1, 1, 5), errno.EPERM),
        ("x86_64", X86, 251, (3, 0, 5), errno.EPERM),
        ("x86_64", X86, 1, (1,), ALLOWED),  # write
        ("x86_64", X86, 0x40000000, (), errno.ENOSYS),  # x32
        ("x86_64", 0x40000003, 0, (), errno.ENOSYS),  # i386
        ("aarch64", ARM, 63, (), ALLOWED),  # read
        ("aarch64", ARM, 0, (), errno.ENOSYS),  # io_setup
        ("aarch64", ARM, 97, (0x10000000,), errno.EPERM),  # unshare
        ("aarch64", ARM, 40, (), errno.EPERM),  # mount
        ("aarch64", ARM, 198, (2,), ALLOWED),
        ("aarch64", ARM, 198, (40,), errno.EAFNOSUPPORT),
        ("aarch64", ARM, 199, (40,), errno.EAFNOSUPPORT),
        ("aarch64", ARM, 122, (1,), errno.EPERM),
        ("aarch64", ARM, 140, (0, 1), errno.EPERM),
        ("aarch64", ARM, 30, (1, 1), errno.EPERM),
        ("aarch64", ARM, 274, (1,), errno.EPERM),
        ("aarch64", X86, 63, (), errno.ENOSYS),
    ],
)
def test_what_is_refused(machine: str, arch: int, number: int, args: tuple[int, ...], expected: int) -> None:
    assert _run(build_filter(machine), arch, number, *args) == expected


@pytest.mark.parametrize(("machine", "arch", "number"), [("x86_64", X86, 240), ("aarch64", ARM, 180)])
def test_message_queues_are_refused_where_nobody_could_list_them(machine: str, arch: int, number: int) -> None:
    assert _run(build_filter(machine), arch, number) == ALLOWED
    assert _run(build_filter(machine, allow_message_queues=False), arch, number) == errno.ENOSYS


def test_an_unknown_processor_is_named() -> None:
    with pytest.raises(UnknownMachine, match="m68k"):
        build_filter("m68k")

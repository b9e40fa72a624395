"""What a slot's first process may do: capabilities, the system call filter, limits, the user it becomes. Raw system calls, few imports."""

from __future__ import annotations

import ctypes
import errno
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Mapping, Sequence

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 36, 38
_SECCOMP_MODE_FILTER = 2
_CAPABILITY_VERSION_3 = 0x20080522
CAP_SETGID, CAP_SETUID = 1 << 6, 1 << 7
_MOST_CAPABILITIES = 64
_INSTRUCTION_BYTES = 8


class _Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


_libc = ctypes.CDLL(None, use_errno=True)


def _check(what: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (what, os.strerror(number)))


def _prctl(option: int, argument: int, pointer: int = 0) -> None:
    arguments = (ctypes.c_ulong(argument), ctypes.c_void_p(pointer), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check("prctl %d" % option, _libc.prctl(ctypes.c_int(option), *arguments))


def die_with_parent(number: int) -> None:
    """Get this signal when the parent ends. Changing the uid clears it."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide() -> None:
    """Close `/proc/PID/{mem,environ,fd}` and ptrace to everybody without capabilities, the same user included."""
    _prctl(_PR_SET_DUMPABLE, 0)


def confine(program: bytes) -> None:
    """What holds for this process and for all that comes from it, for good: hidden, no new privileges, the system call filter."""
    hide()
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    code = ctypes.create_string_buffer(program, len(program))
    whole = _Filter(len(program) // _INSTRUCTION_BYTES, ctypes.addressof(code))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(whole))


def set_capabilities(mask: int) -> None:
    """Hold these capabilities and no others, and leave none to inherit."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(mask, mask, 0, 0, 0, 0)
    _check("capset", _libc.capset(header, sets))


def empty_bounding_set() -> None:
    """Nothing executed from here on can gain a capability."""
    for number in range(_MOST_CAPABILITIES):
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return  # the kernel has no more
            raise


def become(uid: int, gid: int, groups: Sequence[int] = ()) -> None:
    """Be this user, really, effectively and saved, with these groups beside its own and without any of the old user's."""
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def act_as(uid: int, keeper: int) -> None:
    """Do what this user may do, out of its reach: its effective uid is what the kernel asks for, the real and saved ones say who may signal and trace.

    Raises:
        OSError: an id could not be changed.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(keeper, uid, keeper)


def set_limits(limits: Mapping[str, int]) -> None:
    """Set soft and hard limits, as far as the hard limits of this process allow."""
    import resource

    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY and value > hard:
            value = hard
        resource.setrlimit(number, (value, value))


def check_powerless(config: Mapping[str, Any]) -> None:
    """The proof that all this worked; a slot whose init cannot prove it never starts.

    Raises:
        OSError: naming what is still held.
    """
    status = _status()
    for name in (b"CapEff", b"CapPrm", b"CapInh", b"CapAmb"):
        if int(status[name], 16) != 0:
            raise OSError(errno.EPERM, "init still holds capabilities: %s %s" % (name.decode(), status[name].decode().strip()))
    if status[b"NoNewPrivs"].strip() != b"1" or status[b"Seccomp"].strip() != b"2":
        raise OSError(errno.EPERM, "no_new_privs or the system call filter is not in force")
    if config["uid"] is not None and set(status[b"Uid"].split()) != {b"%d" % config["uid"]}:
        raise OSError(errno.EPERM, "init did not become uid %d" % config["uid"])
    if config["uid"] is not None and {int(word) for word in status[b"Groups"].split()} != set(config["groups"]):
        raise OSError(errno.EPERM, "init is in other groups than it should be: %s" % status[b"Groups"].decode().strip())


def _status() -> Dict[bytes, bytes]:
    found = {}
    with open("/proc/self/status", "rb") as file:
        for line in file:
            name, _, value = line.partition(b":")
            found[name] = value
    return found

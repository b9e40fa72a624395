"""Drops the privileges of the first process of a slot: capabilities, the system call filter, resource limits and the user.

The module uses raw system calls, so that init needs few imports.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct

from sandbox_server.agent.init.c_library import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Mapping, Sequence

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_CAPBSET_READ, _PR_CAPBSET_DROP = 1, 4, 22, 23, 24
_PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 36, 38
_SECCOMP_MODE_FILTER = 2
# System calls with the same number on every architecture.
_LANDLOCK_CREATE_RULESET, _LANDLOCK_RESTRICT_SELF = 444, 446
_LANDLOCK_RETURN_VERSION = 1
_LANDLOCK_VERSION_WITH_SCOPES = 6  # since Linux 6.12
_LANDLOCK_SCOPE_ABSTRACT_SOCKETS = 1
_CAPABILITY_VERSION_3 = 0x20080522
CAP_DAC_READ_SEARCH, CAP_SETGID, CAP_SETUID, CAP_NET_ADMIN = 1 << 2, 1 << 6, 1 << 7, 1 << 12
CAP_SYS_CHROOT, CAP_SYS_ADMIN, CAP_SETFCAP = 1 << 18, 1 << 21, 1 << 31
_MOST_CAPABILITIES = 64
_INSTRUCTION_BYTES = 8
_READ = os.O_RDONLY | os.O_CLOEXEC
_STATUS_BYTES = 2048  # more than /proc/self/status has, unless the process is in very many groups


class _Filter(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


_prepared_filters: Dict[bytes, _Filter] = {}
_CAPABILITY_HEADER, _LANDLOCK_RULES = struct.Struct("Ii"), struct.Struct("QQQ")
_CAPABILITY_SETS = struct.Struct("6I")  # Effective, permitted and inheritable, of the lower 32 capabilities and then of the others.


def _check(system_call: str, result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, "%s: %s" % (system_call, os.strerror(number)))


def _prctl(option: int, argument: int, pointer: Any = 0) -> None:
    if libc.prctl(option, argument, pointer, 0, 0) != 0:
        _check("prctl %d" % option, -1)


def die_with_parent(number: int) -> None:
    """Request this signal for the time when the parent process ends. A change of the uid cancels the request."""
    _prctl(_PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent has ended."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def make_undumpable() -> None:
    """Deny access through `/proc/PID/{mem,environ,fd}` and ptrace to every process without capabilities, even to those of the same user."""
    _prctl(_PR_SET_DUMPABLE, 0)


def set_process_flag(option: int, value: int) -> None:
    """Set an attribute of this process; `option` is its `PR_*` number.

    Raises:
        OSError: the kernel has refused it.
    """
    _prctl(option, value)


def forbid_new_privileges() -> None:
    """Forbid this process and its children to gain privileges by executing a program. This is irreversible."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def confine_process(program: bytes, *, is_shared: bool) -> None:
    """Make this process undumpable, forbid new privileges, and install the system call filter. All three are irreversible and apply to its children too.

    Args:
        program: the filter as BPF instructions, see `kernel.seccomp`.
        is_shared: whether the slot shares everything with others, and so keeps their abstract sockets.

    Raises:
        OSError: the kernel has refused one of the calls.
    """
    make_undumpable()
    forbid_new_privileges()
    if not is_shared:
        separate_abstract_sockets()
    whole = _prepared_filters.get(program) or _make_filter(program)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(whole))


def prepare_filter(program: bytes) -> None:
    """Make now what `confine_process` hands to the kernel for this filter, so that inits share the memory for it."""
    _prepared_filters[program] = _make_filter(program)


def _make_filter(program: bytes) -> _Filter:
    return _Filter(len(program) // _INSTRUCTION_BYTES, program)


def can_separate_abstract_sockets() -> bool:
    """Return whether the kernel can do what `separate_abstract_sockets` asks for."""
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_RETURN_VERSION)
    return bool(version >= _LANDLOCK_VERSION_WITH_SCOPES)


def separate_abstract_sockets() -> bool:
    """Deny this process and its children connections to abstract sockets that others have created, through which a slot could receive open files.

    This is irreversible. It must run after `no_new_privs` was set, and before the system call filter.

    Returns:
        Whether it is in force. The kernel may lack Landlock, or have it without scopes.

    Raises:
        OSError: the kernel has scopes, and has refused to apply one.
    """
    if not can_separate_abstract_sockets():
        return False
    attributes = _LANDLOCK_RULES.pack(0, 0, _LANDLOCK_SCOPE_ABSTRACT_SOCKETS)  # no rules for files, none for ports
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        number = ctypes.get_errno()
        raise OSError(number, "landlock_create_ruleset: %s" % os.strerror(number))
    try:
        _check("landlock_restrict_self", libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def set_capabilities(mask: int) -> None:
    """Set the effective and permitted capabilities to this mask, and make none inheritable."""
    low, high = mask & 0xFFFFFFFF, mask >> 32
    sets = _CAPABILITY_SETS.pack(low, low, 0, high, high, 0)
    _check("capset", libc.capset(_CAPABILITY_HEADER.pack(_CAPABILITY_VERSION_3, 0), sets))


def permitted_capabilities() -> int:
    """Return the mask of the capabilities that this process may use."""
    sets = ctypes.create_string_buffer(_CAPABILITY_SETS.size)
    _check("capget", libc.capget(_CAPABILITY_HEADER.pack(_CAPABILITY_VERSION_3, 0), sets))
    _, low, _, _, high, _ = _CAPABILITY_SETS.unpack(sets.raw)
    return int(low | high << 32)


def empty_bounding_set() -> None:
    """Empty the capability bounding set, so that no program that is executed later can gain a capability. A set that is empty already needs no privilege."""
    for number in range(_MOST_CAPABILITIES):
        held = libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0)
        if held < 0:
            return  # The kernel has no capability with this number.
        if held:
            _prctl(_PR_CAPBSET_DROP, number)


def change_user(uid: int, gid: int, groups: Sequence[int] = ()) -> None:
    """Set the real, effective and saved uid and gid, and replace the supplementary groups by `groups`."""
    os.setgroups(list(groups))
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def assume_effective_uid(uid: int, helper_uid: int) -> None:
    """Get the file permissions of a user whose processes cannot signal or trace this process.

    The kernel checks file permissions by the effective uid, and the right to signal or trace a process by its real and saved uids.

    Args:
        uid: the effective uid, that of the slot.
        helper_uid: the real and saved uid. No process of the slot has it.

    Raises:
        OSError: a uid or gid could not be changed.
    """
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(helper_uid, uid, helper_uid)


def set_resource_limits(limits: Mapping[str, int]) -> None:
    """Set soft and hard resource limits by name. A value above the present hard limit is reduced to it."""
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        if hard != resource.RLIM_INFINITY and value > hard:
            value = hard
        resource.setrlimit(number, (value, value))


def check_privileges_dropped(config: Mapping[str, Any]) -> None:
    """Check in /proc/self/status that all privileges have been dropped. A slot whose init fails this check is never started.

    Args:
        config: the configuration of init, with `mode`, `uid` and `groups`.

    Raises:
        OSError: a privilege is still held; the text names it.
    """
    status = _read_own_status()
    for name in (b"CapEff", b"CapPrm", b"CapInh", b"CapAmb"):
        if int(_find_field(status, name), 16) != 0:
            raise OSError(errno.EPERM, "init still holds capabilities: %s %s" % (name.decode(), _find_field(status, name).decode()))
    if _find_field(status, b"NoNewPrivs") != b"1" or _find_field(status, b"Seccomp") != b"2":
        raise OSError(errno.EPERM, "no_new_privs or the system call filter is not in force")
    if config["mode"] == "bwrap" and int(_find_field(status, b"CapBnd"), 16) != 0:
        raise OSError(errno.EPERM, "the capability bounding set of init is not empty: %s" % _find_field(status, b"CapBnd").decode())
    if config["uid"] is not None and set(_find_field(status, b"Uid").split()) != {b"%d" % config["uid"]}:
        raise OSError(errno.EPERM, "init does not run as uid %d" % config["uid"])
    if config["uid"] is not None and set(map(int, _find_field(status, b"Groups").split())) != set(config["groups"]):
        raise OSError(errno.EPERM, "init has the wrong supplementary groups: %s" % _find_field(status, b"Groups").decode())


def _find_field(status: bytes, name: bytes) -> bytes:
    """Return the value of a field of /proc/self/status, without the white space around it.

    Raises:
        OSError: there is no such field.
    """
    start = status.find(b"\n%s:" % name)  # The first field, which none of the checks needs, is the name of the process. It cannot contain a line break.
    if start < 0:
        raise OSError(errno.EPERM, "the kernel does not say what the privileges of init are: %s" % name.decode())
    start += len(name) + 2
    return status[start : status.index(b"\n", start)].strip()


def _read_own_status() -> bytes:
    fd = os.open("/proc/self/status", _READ)
    try:
        status = b""
        while True:
            part = os.read(fd, _STATUS_BYTES)
            if not part:
                return status
            status += part
    finally:
        os.close(fd)

"""Letting go of processes that made init their tracer.

`PTRACE_TRACEME` makes the parent the tracer, without asking it. Programs call it to find out whether a debugger is attached, and their parent may be init:
the program of a call, or one whose own parent has ended. From then on each signal stops the process until its tracer lets it go on, and `wait4` reports
these stops beside the ends. Init debugs nobody: it detaches from what has stopped, and passes the signal on, so that the program runs as one that was never
traced.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found]
import ctypes
import os
import struct

_PTRACE_DETACH, _PTRACE_GETSIGINFO = 17, 0x4202
_SIGINFO_BYTES = 128
_SIGINFO_START = struct.Struct("iii4xi")  # signal, errno, code, and after the padding of 64-bit machines the sender's pid
_SI_USER = 0

_libc = ctypes.CDLL(None, use_errno=True)


def has_ended(status: int) -> bool:
    """Whether a status of `wait4` says that a process is over. All else it can say (stopped, continued) is said of one that lives."""
    return os.WIFEXITED(status) or os.WIFSIGNALED(status)


def detach_stopped_process(pid: int, status: int) -> None:
    """Let a process of this one's go that `wait4` has reported as stopped, and deliver to it the signal that stopped it.

    Args:
        pid: the process or thread that was reported; it may have been killed meanwhile.
        status: as `wait4` gave it.
    """
    if not os.WIFSTOPPED(status):
        return
    number = os.WSTOPSIG(status)
    # The kernel stops a traced process with SIGTRAP when it has executed a program. Untraced it would have got no signal, and this one would kill it.
    if number == signal.SIGTRAP and _sent_by_exec(pid):
        number = 0
    _ptrace(_PTRACE_DETACH, pid, number)


def _sent_by_exec(pid: int) -> bool:
    """Whether a SIGTRAP looks as the kernel sends it after `execve`: as `kill` by the process itself. `raise` and breakpoints look different."""
    about = ctypes.create_string_buffer(_SIGINFO_BYTES)
    if _ptrace(_PTRACE_GETSIGINFO, pid, ctypes.addressof(about)) != 0:
        return False
    _, _, code, sender = _SIGINFO_START.unpack_from(about.raw)
    return bool(code == _SI_USER and sender == pid)


def _ptrace(request: int, pid: int, data: int) -> int:
    """The result, -1 for a process that is gone."""
    return int(_libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), ctypes.c_void_p(0), ctypes.c_void_p(data)))

"""Detaches from processes that have made init their tracer.

`PTRACE_TRACEME` makes the parent of a process its tracer, without the consent of the parent. Programs call it to find out whether a debugger is attached, and
their parent may be init: for the program of a call, or for a program whose parent has ended. From then on, each signal stops the process until its tracer
continues it, and `wait4` reports these stops as well as ends. Init never traces processes. It detaches from a stopped process and delivers the signal to it, so
that the program runs as if it had never been traced.
"""

from __future__ import annotations

import ctypes
import os
import struct

from sandbox_server.agent.init.c_library import libc

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # `signal` would import `enum`, for which every slot would need memory

_PTRACE_DETACH, _PTRACE_GETSIGINFO = 17, 0x4202
_SIGINFO_BYTES = 128
_SIGINFO_START = struct.Struct("iii4xi")  # Signal, errno, code, and after the padding on 64-bit machines the pid of the sender.
_SI_USER = 0


def has_ended(status: int) -> bool:
    """Return whether a status of `wait4` means that the process has ended. Any other status (stopped, continued) is that of a process that still runs."""
    return os.WIFEXITED(status) or os.WIFSIGNALED(status)


def detach_stopped_process(pid: int, status: int) -> None:
    """Detach from a child that `wait4` has reported as stopped, and deliver the signal that has stopped it.

    Args:
        pid: the process or thread that was reported; it may have been killed meanwhile.
        status: the status that `wait4` returned.
    """
    if not os.WIFSTOPPED(status):
        return
    number = os.WSTOPSIG(status)
    # The kernel stops a traced process with SIGTRAP after `execve`. An untraced process gets no such signal, and delivering it would kill the process.
    if number == signal.SIGTRAP and _sent_by_exec(pid):
        number = 0
    _ptrace(_PTRACE_DETACH, pid, number)


def _sent_by_exec(pid: int) -> bool:
    """Return whether the kernel has sent a SIGTRAP after `execve`. It then looks like a `kill` by the process itself; `raise` and breakpoints differ."""
    about = ctypes.create_string_buffer(_SIGINFO_BYTES)
    if _ptrace(_PTRACE_GETSIGINFO, pid, ctypes.addressof(about)) != 0:
        return False
    _, _, code, sender = _SIGINFO_START.unpack_from(about.raw)
    return bool(code == _SI_USER and sender == pid)


def _ptrace(request: int, pid: int, data: int) -> int:
    """Call ptrace and return its result, which is -1 if the process no longer exists."""
    return int(libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), ctypes.c_void_p(0), ctypes.c_void_p(data)))

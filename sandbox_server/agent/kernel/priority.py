"""The scheduling priority of the service and its agents relative to the processes in slots.

Linux divides the processor between sessions if it groups processes by session (`sched_autogroup_enabled`), and between threads otherwise. Every command has
its own session. With fifty busy commands and one service, the service would get one of 51 parts of the processor, and all of its clients would wait for the
commands. Therefore the service and the agent raise the priority of their threads and of their session. This requires CAP_SYS_NICE.

A raised priority alone has a price where many short commands run: the scheduler interrupts a command for every single event of the service or the agent.
Each event then costs two context switches and a round of the event loop, which doubled the processor time that service and agents need for a call. Time
slices prevent this from Linux 6.12 on: a running process is not interrupted before the end of its slice by one that has asked for a longer slice. Its part
of the processor stays the same. Older kernels ignore the request.
See `sched_setattr(2)`, and the kernel's Documentation/scheduler/sched-eevdf.rst.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

_ORDINARY_NICE = 0
RAISED_NICE = -5  # The weight of a nice value of -5 is 3 times that of 0. A nice value of -15 halved the calls per second of batches, and made nothing quicker.
#: The slice of the processes of a slot, which is that of an ordinary process on most machines. With a longer one, init would wait longer for its turn in a slot
#: that runs many processes.
SLOT_SLICE_NS = 2_000_000
#: The slice of the service and the agent, which is longer than that of the slots. The longest that the kernel accepts is 100 ms.
RAISED_SLICE_NS = 80_000_000

#: The number of sched_setattr, which the C library has no function for before glibc 2.41.
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274, "riscv64": 274}
#: struct sched_attr of the first version: size, policy, flags, nice, priority, runtime, deadline, period.
_SCHED_ATTR = struct.Struct("=IIQiIQQQ")
_libc = ctypes.CDLL(None, use_errno=True)


def raise_priority() -> None:
    """Raise the priority of this process, of its present and future threads, and of its session, as far as the kernel permits it.

    A process that was started with a lower priority than normal keeps it, because an operator has chosen that priority.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) > _ORDINARY_NICE:
        return
    try:
        for thread in os.listdir("/proc/self/task"):
            _raise_thread_priority(int(thread))
        with open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(RAISED_NICE))
    except OSError:
        return  # CAP_SYS_NICE is missing, or the kernel does not group sessions, or not this one (the first session has no group), or /proc is read-only.


def set_slot_slice(pid: int) -> None:
    """Give the first process of a slot the time slice of slots, for itself and for all that it starts later.

    Args:
        pid: the process. It has one thread, and has inherited the slice of the agent.
    """
    try:
        _set_slice_ns(pid, os.getpriority(os.PRIO_PROCESS, pid), SLOT_SLICE_NS)
    except ProcessLookupError:
        return  # It has ended.


def _raise_thread_priority(thread: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, thread, RAISED_NICE)
        _set_slice_ns(thread, RAISED_NICE, RAISED_SLICE_NS)
    except ProcessLookupError:
        return  # The thread has ended.


def _set_slice_ns(thread: int, nice: int, slice_ns: int) -> None:
    """Ask for a time slice. A kernel that does not know slices, and a sandbox that refuses the request, leave it as it is.

    Raises:
        ProcessLookupError: there is no such thread.
    """
    number = _SCHED_SETATTR.get(os.uname().machine)
    if number is None or sys.maxsize < 2**32 or os.sched_getscheduler(thread) != os.SCHED_OTHER:  # 32-bit programs have other numbers
        return
    _libc.syscall(number, thread, _SCHED_ATTR.pack(_SCHED_ATTR.size, os.SCHED_OTHER, 0, nice, 0, slice_ns, 0, 0), 0)

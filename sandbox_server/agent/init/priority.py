"""The scheduling priority of the service and its agents relative to the processes in slots.

Linux divides the processor between sessions if it groups processes by session (`sched_autogroup_enabled`), and between threads otherwise. Every command has
its own session. With fifty busy commands and one service, the service would get one of 51 parts of the processor, and all of its clients would wait for the
commands. Therefore the service and the agent raise the priority of their threads and of their session. This requires CAP_SYS_NICE.
"""

from __future__ import annotations

import os

RAISED_NICE = -15  # The weight of a nice value of -15 is 28 times that of 0.
ORDINARY_NICE = 0


def raise_priority() -> None:
    """Raise the priority of this process, of its present and future threads, and of its session, as far as the kernel permits it.

    A process that was started with a lower priority than normal keeps it, because an operator has chosen that priority.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) > ORDINARY_NICE:
        return
    try:
        for thread in os.listdir("/proc/self/task"):
            _raise_thread_priority(int(thread))
        with open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(RAISED_NICE))
    except OSError:
        return  # CAP_SYS_NICE is missing, or the kernel does not group sessions, or not this one (the first session has no group), or /proc is read-only.


def _raise_thread_priority(thread: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, thread, RAISED_NICE)
    except ProcessLookupError:
        return  # The thread has ended.


def take_ordinary_priority() -> None:
    """Return to the normal priority if this process has inherited a raised one. A new session always starts with the normal priority."""
    if os.getpriority(os.PRIO_PROCESS, 0) < ORDINARY_NICE:
        os.setpriority(os.PRIO_PROCESS, 0, ORDINARY_NICE)

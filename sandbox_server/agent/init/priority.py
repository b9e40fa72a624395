"""The claim of the service and its agents to the processor, beside what runs in slots.

Linux shares the processor out between sessions where it groups by session (`sched_autogroup_enabled`), and between threads where it does not. Every
command has a session of its own, so of fifty busy commands and one service, the service would get a fifty-first of the processor, and everybody who waits
for it would wait for the commands. So service and agent raise their own claim, in both ways. To do so takes CAP_SYS_NICE.
"""

from __future__ import annotations

import os
from contextlib import suppress

RAISED_NICE = -15  # 28 times the claim of an ordinary session or thread
ORDINARY_NICE = 0


def raise_priority() -> None:
    """Raise the claim of this process, of the threads it has and will have, and of its session, as far as the kernel allows.

    A process that was started with a lower claim than an ordinary one keeps it: somebody has decided so.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) > ORDINARY_NICE:
        return
    with suppress(PermissionError):  # no CAP_SYS_NICE
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread), RAISED_NICE)
        # OSError: the kernel groups no sessions, or not this one (its first session has no group), or /proc is read-only.
        with suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(RAISED_NICE))


def take_ordinary_priority() -> None:
    """Give up a raised claim that was inherited. A new session begins with an ordinary one anyway."""
    if os.getpriority(os.PRIO_PROCESS, 0) < ORDINARY_NICE:
        os.setpriority(os.PRIO_PROCESS, 0, ORDINARY_NICE)

"""The claim of the service and its agents to the processor, beside what runs in slots.

Linux shares the processor out between sessions where it groups by session (`sched_autogroup_enabled`), and between threads where it does not. Every
command has a session of its own, so of fifty busy commands and one service, the service would get a fifty-first of the processor, and everybody who waits
for it would wait for the commands. So service and agent raise their own claim, in both ways. To do so takes CAP_SYS_NICE.
"""

from __future__ import annotations

import os
from contextlib import suppress

RAISED = -15  # 28 times the claim of an ordinary session or thread
ORDINARY = 0


def raise_priority() -> bool:
    """Raise the claim of this process, of the threads it has and will have, and of its session.

    Whoever started it with a lower claim than an ordinary one has decided: nothing is changed then.

    Returns:
        Whether it has been raised.
    """
    if os.getpriority(os.PRIO_PROCESS, 0) > ORDINARY:
        return False
    try:
        for thread in os.listdir("/proc/self/task"):
            with suppress(ProcessLookupError):  # it has ended
                os.setpriority(os.PRIO_PROCESS, int(thread), RAISED)
        with suppress(FileNotFoundError), open("/proc/self/autogroup", "w", encoding="ascii") as file:  # a kernel that knows no groups of sessions
            file.write(str(RAISED))
    except OSError:
        return False  # no CAP_SYS_NICE, or a read-only /proc
    return True


def take_ordinary_priority() -> None:
    """Give up a raised claim that was inherited. A new session begins with an ordinary one anyway."""
    if os.getpriority(os.PRIO_PROCESS, 0) < ORDINARY:
        os.setpriority(os.PRIO_PROCESS, 0, ORDINARY)

"""Whom the kernel kills first when the whole machine is out of memory: what runs in slots, then their inits; the agent and the service last.

A score can always be raised. To lower one, or to set a floor that the process and its children cannot go below, takes CAP_SYS_RESOURCE: the kernel keeps
the score that such a process wrote as the floor.
"""

from __future__ import annotations

SLOT_FLOOR = 300
OF_SPAWNED = 600
_OF_AGENT = -900


def _write(pid: str, score: int) -> None:
    with open("/proc/%s/oom_score_adj" % pid, "w", encoding="ascii") as file:
        file.write(str(score))


def protect_this_process() -> bool:
    """Have this process killed last; whether that is allowed, and with it to set floors."""
    try:
        _write("self", _OF_AGENT)
    except OSError:
        return False  # no CAP_SYS_RESOURCE, or a read-only /proc
    return True


def set_floor(init_pid: int) -> None:
    """Set the floor of a slot, on its init, before anything else runs in it. For a process that could protect itself.

    Raises:
        OSError: it could not be set.
    """
    _write(str(init_pid), SLOT_FLOOR)

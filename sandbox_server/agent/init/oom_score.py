"""Sets `oom_score_adj`, by which the kernel chooses the process to kill when the whole machine is out of memory.

Processes in slots are killed first, then the inits of slots, and the agent and the service last. Every process may raise its score. Lowering a score, or
setting a minimum for a process and its children, requires CAP_SYS_RESOURCE: the kernel keeps a score that such a process has written as the minimum.
"""

from __future__ import annotations

SLOT_FLOOR_SCORE = 300
SPAWNED_SCORE = 600
_AGENT_SCORE = -900


def _write_score(pid: str, score: int) -> None:
    with open("/proc/%s/oom_score_adj" % pid, "w", encoding="ascii") as file:
        file.write(str(score))


def protect_this_process() -> bool:
    """Make this process the last one that the kernel kills.

    Returns:
        Whether this process is permitted to do so. It is then also permitted to call `set_slot_floor`.
    """
    try:
        _write_score("self", _AGENT_SCORE)
    except OSError:
        return False  # CAP_SYS_RESOURCE is missing, or /proc is read-only.
    return True


def set_slot_floor(init_pid: int) -> None:
    """Set the minimum score of all processes of a slot. Call this on its init before anything else runs in the slot.

    Only a process for which `protect_this_process` returned True may call it.

    Args:
        init_pid: the process id of the slot's init.

    Raises:
        OSError: the score could not be set.
    """
    _write_score(str(init_pid), SLOT_FLOOR_SCORE)

"""The scheduling priority of what runs in a slot: the normal one. The agent, whose priority is raised, has started its first process."""

from __future__ import annotations

import os

_ORDINARY_NICE = 0


def take_ordinary_priority() -> None:
    """Return to the normal priority if this process has inherited a raised one. A new session always starts with the normal priority."""
    if os.getpriority(os.PRIO_PROCESS, 0) < _ORDINARY_NICE:
        os.setpriority(os.PRIO_PROCESS, 0, _ORDINARY_NICE)

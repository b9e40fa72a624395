"""Decides whether the program in a terminal has finished what keys have started, and waits for its next keys."""

from __future__ import annotations

import dataclasses

QUIET_S = 0.2  # a program that reads keys and has printed nothing for so long has settled
QUIET_WITHOUT_OUTPUT_S = 1.0  # the same, if it has printed nothing at all since the keys were sent: it may not have read them yet
QUIET_AT_PROMPT_S = 1.0  # a program that reads lines and has stopped printing behind the last text, as at a prompt, has settled after so long


@dataclasses.dataclass(frozen=True)
class TerminalActivity:
    """What is known about a terminal at one moment.

    Args:
        quiet_s: for how long nothing was printed and no keys were sent, in seconds.
        has_printed: whether anything was printed since the keys were sent.
        reads_keys: whether the terminal passes single keys on, as editors, pagers and shells that wait for a command have set it. While a shell runs a
            command, the terminal passes on lines.
        cursor_x: the column of the cursor.
    """

    quiet_s: float
    has_printed: bool
    reads_keys: bool
    cursor_x: int


def required_quiet_s(has_printed: bool) -> float:
    """For how long a terminal must be quiet before it is worth looking at its other state, in seconds."""
    return QUIET_S if has_printed else QUIET_WITHOUT_OUTPUT_S


def is_settled(activity: TerminalActivity) -> bool:
    """Whether the program waits for keys."""
    if activity.quiet_s < required_quiet_s(activity.has_printed):
        return False
    if activity.reads_keys:
        return True
    return activity.cursor_x > 0 and activity.quiet_s >= QUIET_AT_PROMPT_S

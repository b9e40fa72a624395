"""Bounds and pauses of measurements, so that a slot with very many files or processes costs the agent little time."""

from __future__ import annotations

import time

MAX_ENTRIES = 2_000_000  # Files and folders of one walk.
MAX_DESCRIPTORS = 20_000  # Open files of all processes of one slot.
STAT_BLOCK_BYTES = 512  # The unit of `st_blocks`, whatever the file system.
_ENTRIES_PER_PAUSE = 500
_PAUSE_S = 0.005
_REST_FACTOR = 10


def pause_between_entries(entry_count: int) -> None:
    """Pause briefly in a walk after every 500th entry. Call it in the thread of the walk, for each entry.

    Args:
        entry_count: how many entries the walk has seen so far.
    """
    if entry_count % _ENTRIES_PER_PAUSE == 0:
        time.sleep(_PAUSE_S)


def pause_after_measurement_s(took_s: float, least_s: float) -> float:
    """Return how many seconds after a measurement the next one begins: ten times as long as the measurement took, so that measuring takes at most a tenth.

    Args:
        took_s: how long the measurement took, in seconds.
        least_s: the shortest pause, in seconds.
    """
    return max(least_s, _REST_FACTOR * took_s)

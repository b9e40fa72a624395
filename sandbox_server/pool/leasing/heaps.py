"""Heaps that may contain stale entries.

An entry of an object that has ended stays in its heap until it reaches the top, or until most of the heap consists of such entries.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[float, Any])

#: A heap is not rebuilt for this many stale entries or fewer.
MAX_STALE_ENTRIES = 1024


def without_stale_entries(heap: list[T], live_count: int, live_entries: Iterable[T]) -> list[T]:
    """Return the heap, or a new heap if most entries are stale.

    Args:
        heap: the heap.
        live_count: how many objects have not ended.
        live_entries: the entries of those objects; read only if a new heap is made.
    """
    if len(heap) <= MAX_STALE_ENTRIES + 2 * live_count:
        return heap
    new_heap = list(live_entries)
    heapq.heapify(new_heap)
    return new_heap

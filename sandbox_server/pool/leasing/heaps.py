"""Heaps whose entries may outlive what they are of: who has ended stays in until its time comes, or until most of the heap is of such."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T", bound=tuple[float, Any])

#: So many entries of what has ended are no reason to make a heap anew.
SLACK = 1024


def tidied(heap: list[T], living: int, entries: Iterable[T]) -> list[T]:
    """The heap, or a new one where most of it is of what has ended.

    Args:
        heap: as it is.
        living: how many things have not ended.
        entries: theirs; looked at only for a new heap.
    """
    if len(heap) <= SLACK + 2 * living:
        return heap
    fresh = list(entries)
    heapq.heapify(fresh)
    return fresh

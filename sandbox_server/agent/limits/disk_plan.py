"""Decides when a file system counts as full and which slot is ended then. The functions here only calculate; they access no files."""

from __future__ import annotations

import dataclasses
from typing import Iterable, Tuple, TypeVar

_RESERVE_BYTES = 2 << 30
_RESERVE_FRACTION = 0.05
_MAX_RESERVE_FRACTION = 0.25  # Of a file system that is so small that 2 GiB would be most of it.
_RELEVANT_FRACTION = 1 / 16

Key = TypeVar("Key")
Use = Tuple[int, int]
"""What a slot uses: bytes, and files."""


@dataclasses.dataclass(frozen=True)
class Space:
    """The size and the free space of a file system, in bytes and in files. `files` is 0 if the number of files is not limited."""

    size_bytes: int
    free_bytes: int
    files: int
    free_files: int


@dataclasses.dataclass(frozen=True)
class Reserve:
    """How much of a file system must stay free, in bytes and in files. `files` is 0 if the number of files is not limited."""

    size_bytes: int
    files: int

    def is_exceeded(self, space: Space) -> bool:
        """Return whether less than the reserve is free."""
        return space.free_bytes < self.size_bytes or space.free_files < self.files

    def helps_to_end(self, size_bytes: int, entries: int, space: Space) -> bool:
        """Return whether it would help to end a slot that uses this much: at least a sixteenth of the reserve of which too little is free.

        Args:
            size_bytes: how many bytes the slot uses.
            entries: how many files the slot has.
            space: the present state of the file system.
        """
        if space.free_bytes < self.size_bytes and size_bytes >= _RELEVANT_FRACTION * self.size_bytes:
            return True
        return space.free_files < self.files and entries >= _RELEVANT_FRACTION * self.files

    def is_exceeded_by(self, use: Use, others: Iterable[Use], space: Space) -> bool:
        """Return whether one slot alone has caused that less than the reserve is free.

        This is so if the slot uses at least as much as the reserve, and too little would be free even without the other slots that it would help to end.
        Space that no slot uses does not count, because it was never available to slots.

        Args:
            use: what the slot uses.
            others: what each other slot uses.
            space: the present state of the file system.
        """
        others = [other for other in others if self.helps_to_end(*other, space)]
        size_bytes, files = sum(other[0] for other in others), sum(other[1] for other in others)
        return (use[0] >= self.size_bytes and space.free_bytes + size_bytes < self.size_bytes) or (
            use[1] >= self.files and space.free_files + files < self.files
        )


def compute_reserve(space: Space, configured_bytes: int | None) -> Reserve:
    """Return how much of a file system must stay free.

    Args:
        space: the file system.
        configured_bytes: the configured reserve, in bytes; None for the larger of 2 GiB and 5 %, but at most a quarter. The reserve of files is always 5 %.
    """
    if configured_bytes is None:
        configured_bytes = int(min(max(_RESERVE_BYTES, _RESERVE_FRACTION * space.size_bytes), _MAX_RESERVE_FRACTION * space.size_bytes))
    return Reserve(configured_bytes, int(_RESERVE_FRACTION * space.files))


def choose_slot_to_end(uses: Iterable[tuple[Key, int, int]], space: Space, reserve: Reserve) -> Key | None:
    """Choose the slot that uses most of what is short.

    Args:
        uses: each slot with the number of bytes and of files that it uses.
        space: the present state of the file system.
        reserve: how much must stay free.

    Returns:
        The slot; None if it would not help to end any of them.
    """
    by_files = space.free_bytes >= reserve.size_bytes
    candidates = [use for use in uses if reserve.helps_to_end(use[1], use[2], space)]
    most = max(candidates, key=lambda use: use[2] if by_files else use[1], default=None)
    return most[0] if most is not None else None

"""When a file system counts as full, and which slot goes then: plain arithmetic, no files."""

from __future__ import annotations

import dataclasses
from typing import Iterable, Tuple, TypeVar

MIB = 1 << 20
_FREE_BYTES = 2 << 30
_FREE_PART = 0.05
_MOST_FREE_PART = 0.25  # of a file system so small that 2 GiB would be most of it
_WORTH_PART = 1 / 16

Key = TypeVar("Key")
Use = Tuple[int, int]
"""What a slot takes: bytes, and files."""


@dataclasses.dataclass(frozen=True)
class Space:
    """A file system now, in bytes and in files. `files` 0: it has no limit of files."""

    size_bytes: int
    free_bytes: int
    files: int
    free_files: int


@dataclasses.dataclass(frozen=True)
class Reserve:
    """What of a file system must stay free. `files` 0: it has no limit of files."""

    size_bytes: int
    files: int

    def is_broken(self, space: Space) -> bool:
        """Whether less than that is free."""
        return space.free_bytes < self.size_bytes or space.free_files < self.files

    def is_worth(self, size_bytes: int, entries: int, space: Space) -> bool:
        """Whether ending a slot that takes so much would help: it takes a sixteenth, at least, of what must stay free and is not."""
        if space.free_bytes < self.size_bytes and size_bytes >= _WORTH_PART * self.size_bytes:
            return True
        return space.free_files < self.files and entries >= _WORTH_PART * self.files

    def is_broken_by(self, use: Use, others: Iterable[Use], space: Space) -> bool:
        """Whether one slot broke it alone: it takes at least what must stay free, which would be broken though those others had nothing of which to end one
        would help. What slots do not take was never free for them.
        """
        others = [other for other in others if self.is_worth(*other, space)]
        size_bytes, files = sum(other[0] for other in others), sum(other[1] for other in others)
        return (use[0] >= self.size_bytes and space.free_bytes + size_bytes < self.size_bytes) or (
            use[1] >= self.files and space.free_files + files < self.files
        )


def compute_reserve(space: Space, told_bytes: int | None) -> Reserve:
    """What must stay free: as told, else the larger of 2 GiB and 5 %, but at most a quarter; of files 5 %."""
    if told_bytes is None:
        told_bytes = int(min(max(_FREE_BYTES, _FREE_PART * space.size_bytes), _MOST_FREE_PART * space.size_bytes))
    return Reserve(told_bytes, int(_FREE_PART * space.files))


def choose_slot_to_end(uses: Iterable[tuple[Key, int, int]], space: Space, reserve: Reserve) -> Key | None:
    """The slot that takes most of what is missing, given (slot, bytes, files); None: to end any would not help."""
    by_files = space.free_bytes >= reserve.size_bytes
    worth = [use for use in uses if reserve.is_worth(use[1], use[2], space)]
    most = max(worth, key=lambda use: use[2] if by_files else use[1], default=None)
    return most[0] if most is not None else None

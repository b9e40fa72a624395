"""The items of an environment in the order of their use: rows in turn, items that are put back, rows that cannot be used."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable
from typing import Any

#: Returns what identifies an item.
ItemKey = Callable[[Any], Hashable]


class PutBackItems:
    """Items whose group came to nothing through no fault of the model.

    Args:
        key: returns what identifies an item.
        max_put_backs: how often one item is used again.
    """

    def __init__(self, key: ItemKey, max_put_backs: int) -> None:
        self._key = key
        self._max_put_backs = max_put_backs
        self._waiting: deque[Any] = deque()
        self._counts: Counter[Hashable] = Counter()

    def put_back(self, item: Any) -> bool:
        """Put an item back. Returns whether it will be used again: an item that was put back too often will not."""
        key = self._key(item)
        self._counts[key] += 1
        if self._counts[key] > self._max_put_backs:
            return False
        self._waiting.append(item)
        return True

    def take(self) -> Any | None:
        """Return an item that was put back, the oldest first; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def forget(self, item: Any) -> None:
        """Take note that an item was used with success."""
        self._counts.pop(self._key(item), None)


def item_name(item: Any) -> str:
    """Return what an item is called in messages: its `instance_id`, `id`, `task_id` or `name`, else the beginning of its text."""
    if isinstance(item, dict):
        named = next((str(item[name]) for name in ("instance_id", "id", "task_id", "name") if item.get(name)), None)
        if named is not None:
            return named
    text = " ".join(str(item).split())
    return "".join(itertools.islice(text, 80))

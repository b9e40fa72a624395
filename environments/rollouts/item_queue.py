"""Items that are used again because their group came to nothing, and items that are never used again."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping
from typing import Any

#: Returns what identifies an item.
ItemKey = Callable[[Any], Hashable]
_NAME_FIELDS = ("instance_id", "id", "task_id", "name")


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
        self._excluded: set[Hashable] = set()

    def put_back(self, item: Any) -> bool:
        """Put an item back. Returns whether it will be used again: an item that was put back too often will not."""
        key = self._key(item)
        self._counts[key] += 1
        if self._counts[key] > self._max_put_backs:
            self._excluded.add(key)
            return False
        self._waiting.append(item)
        return True

    def take(self) -> Any | None:
        """Return an item that was put back, the oldest first; None if there is none."""
        return self._waiting.popleft() if self._waiting else None

    def return_unused(self, item: Any) -> None:
        """Put an item back that was not used. This does not count."""
        self._waiting.append(item)

    def exclude(self, item: Any) -> None:
        """Never use an item again."""
        self._excluded.add(self._key(item))

    def is_excluded(self, item: Any) -> bool:
        """Return whether an item must not be used again."""
        return self._key(item) in self._excluded

    def forget(self, item: Any) -> None:
        """Take note that an item was used with success."""
        self._counts.pop(self._key(item), None)


def item_key(item: Any) -> Hashable:
    """Return what identifies an item: its name if it has one, else its whole content."""
    return item_name(item) if _named(item) else repr(item)


def item_name(item: Any) -> str:
    """Return what an item is called in messages: its `instance_id`, `id`, `task_id` or `name`, else the beginning of its text."""
    return _named(item) or " ".join(str(item).split())[:80]


def _named(item: Any) -> str | None:
    values = (item.get(name) if isinstance(item, Mapping) else getattr(item, name, None) for name in _NAME_FIELDS)
    return next((str(value) for value in values if value), None)

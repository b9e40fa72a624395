"""Which rows of a data set a run uses, and in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

from environments.dataset_rows import Rows, UnusableRow


class RowOrder:
    """Goes through the first usable rows of a data set, again and again.

    Args:
        rows: the data set.
        check: raises `UnusableRow` for a row that cannot be used.
        report: is called with the name of each row that cannot be used, and the reason, once.
        max_items: how many rows are used; 0 for all. A row that is excluded later is replaced by the next one.
        shuffle: whether to shuffle the rows.
        seed: decides about the order of shuffled rows.
    """

    def __init__(
        self, rows: Rows, check: Callable[[dict[str, Any]], object], report: Callable[[str, str], None], *, max_items: int, shuffle: bool, seed: int
    ) -> None:
        self._rows = rows
        self._check = check
        self._report = report
        self._max_items = max_items
        order = list(range(len(rows)))
        if shuffle:
            random.Random(seed).shuffle(order)
        self._unseen: Iterator[int] = iter(order)
        self._used: list[int] = []
        self._position = 0

    def next(self, is_excluded: Callable[[dict[str, Any]], bool]) -> dict[str, Any] | None:
        """Return the next row, or None if there is none.

        Args:
            is_excluded: returns whether a row must not be used again.
        """
        while self._position < len(self._used):
            row = self._rows.read(self._used[self._position])
            if not is_excluded(row):
                self._position += 1
                return row
            del self._used[self._position]
        if not self._max_items or len(self._used) < self._max_items:
            for number in self._unseen:
                usable = self._read(number)
                if usable is not None and not is_excluded(usable):
                    self._used.append(number)
                    self._position = len(self._used)
                    return usable
        if not self._used:
            return None
        self._position = 0
        return self.next(is_excluded)

    def _read(self, number: int) -> dict[str, Any] | None:
        """Return a row that was not read before; None if it cannot be used, which is reported."""
        row: dict[str, Any] = {}
        try:
            row = self._rows.read(number)
            self._check(row)
        except UnusableRow as error:
            self._report(str(row.get("instance_id") or self._rows.name(number)), str(error))
            return None
        return row

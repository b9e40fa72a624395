"""Pages of lists: the query parameters `limit` and `cursor`, and `next_cursor` in the response. The same for every list."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from sandbox_server.api.contract.describe import parameter
from sandbox_server.api.contract.parse import whole_number
from sandbox_server.api.limits import Limits, too_many
from sandbox_server.core.errors import InvalidRequest

DEFAULT_PAGE_ITEMS = 100
MOST_ITEMS = 1_000_000
MAX_CURSOR_CHARS = 8192
PAGE_NAMES = ("limit", "cursor")
PAGE_PARAMETERS = (
    parameter("limit", {"type": "integer", "minimum": 1, "maximum": 1000}, "items in a page"),
    parameter("cursor", {"type": "string", "maxLength": MAX_CURSOR_CHARS}, "the `next_cursor` of the page before"),
)

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class PageRequest:
    """The part of a list that a request asks for.

    Args:
        limit: the most items that the page may have.
        after: the key of the last item of the previous page; None for the first page.
    """

    limit: int
    after: str | None

    @classmethod
    def of(cls, asked: Mapping[str, str], limits: Limits, default: int | None = None) -> PageRequest:
        """Read the page from the query parameters of a request.

        Args:
            asked: the query parameters.
            limits: the limits of the service; `page_items` is the most items of a page.
            default: how many items a page has if the query has no `limit`; None: `DEFAULT_PAGE_ITEMS`.

        Raises:
            InvalidRequest: the limit is not a number in range, or the cursor is not valid.
        """
        limit = whole_number(asked.get("limit"), "limit", min(DEFAULT_PAGE_ITEMS, limits.page_items) if default is None else default, MOST_ITEMS)
        if limit > max(limits.page_items, default or 0):
            raise too_many(limits, "page_items", "limit")
        cursor = asked.get("cursor")
        return cls(limit=limit, after=None if cursor is None else _decoded(cursor))

    def cut(self, items: Iterable[Item], key: Callable[[Item], str]) -> tuple[list[Item], str | None]:
        """Sort a whole list by its keys. Returns the items of this page, and the cursor of the next page; None if this is the last one."""
        ordered = sorted((item for item in items if self.after is None or key(item) > self.after), key=key)
        page = ordered[: self.limit]
        return page, next_cursor(key(page[-1])) if len(ordered) > self.limit else None


def next_cursor(key: str) -> str:
    """The cursor of the page that follows the item with this key. Its form may change; clients only send it back."""
    return base64.urlsafe_b64encode(key.encode("utf-8", "surrogatepass")).decode("ascii").rstrip("=")


def _decoded(cursor: str) -> str:
    try:
        if len(cursor) > MAX_CURSOR_CHARS or not cursor.isascii():
            raise ValueError
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), b"-_", validate=True).decode("utf-8", "surrogatepass")
    except (ValueError, binascii.Error):
        raise InvalidRequest("cursor: is not a cursor of this list", field="cursor") from None


def page_document(name: str, items: list[Any], cursor: str | None) -> dict[str, Any]:
    """The JSON of a page."""
    return {name: items} if cursor is None else {name: items, "next_cursor": cursor}

"""Cleaning up what a step has left behind that did not succeed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def cleanup_on_failure(clean_up: Callable[[], object]) -> Iterator[None]:
    """Call a function if the block of this `with` statement does not succeed. The error goes on.

    Args:
        clean_up: the function. It is also called when the block is cancelled, which is why BaseException is caught here.
    """
    try:
        yield
    except BaseException:
        clean_up()
        raise

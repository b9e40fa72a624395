"""Cleaning up what a step has left behind that did not succeed."""

from __future__ import annotations

from collections.abc import Callable


class cleanup_on_failure:  # noqa: N801  # it is used like a function; a generator with `contextlib.contextmanager` takes three times as long
    """Call a function if the block of this `with` statement does not succeed. The error goes on.

    Args:
        clean_up: the function. It is also called when the block is cancelled.
    """

    __slots__ = ("_clean_up",)

    def __init__(self, clean_up: Callable[[], object]) -> None:
        self._clean_up = clean_up

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """End the block."""
        if kind is not None:
            self._clean_up()

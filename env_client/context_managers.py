"""Context managers that explain themselves if they are used without `with`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
V = TypeVar("V")


def explained_context_manager(method: Callable[P, AbstractContextManager[V]]) -> Callable[P, UnenteredContext[V]]:
    """Decorate a client method that returns a context manager, so that using the result without `with` raises an error that shows how to use it."""

    @functools.wraps(method)
    def create_context(*args: P.args, **options: P.kwargs) -> UnenteredContext[V]:
        return UnenteredContext(method(*args, **options), f"with client.{method.__name__}(…) as")

    return create_context


def explained_async_context_manager(method: Callable[P, AbstractAsyncContextManager[V]]) -> Callable[P, AsyncUnenteredContext[V]]:
    """The counterpart of `explained_context_manager` for `async with`."""

    @functools.wraps(method)
    def create_context(*args: P.args, **options: P.kwargs) -> AsyncUnenteredContext[V]:
        return AsyncUnenteredContext(method(*args, **options), f"async with client.{method.__name__}(…) as")

    return create_context


class _Unentered:
    """The base class of both contexts: every attribute raises an error with the correct usage.

    Args:
        usage: the `with` statement to write.
    """

    _usage = ""

    def __init__(self, usage: str) -> None:
        self._usage = usage

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"no slot is held yet, so there is no {name!r}: write `{self._usage} …:`, or call client.hold() to hold slots without a block")


class UnenteredContext(_Unentered, AbstractContextManager[V]):
    """A context manager whose `with` block has not begun."""

    def __init__(self, context: AbstractContextManager[V], usage: str) -> None:
        super().__init__(usage)
        self._context = context

    def __enter__(self) -> V:
        return self._context.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool | None:
        return self._context.__exit__(kind, error, traceback)


class AsyncUnenteredContext(_Unentered, AbstractAsyncContextManager[V]):
    """A context manager whose `async with` block has not begun."""

    def __init__(self, context: AbstractAsyncContextManager[V], usage: str) -> None:
        super().__init__(usage)
        self._context = context

    async def __aenter__(self) -> V:
        return await self._context.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool | None:
        return await self._context.__aexit__(kind, error, traceback)

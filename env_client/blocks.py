"""What is there only in a `with` block says so when it is used without one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from types import TracebackType
from typing import NoReturn, ParamSpec, TypeVar

P = ParamSpec("P")
V = TypeVar("V")


def block(make: Callable[P, AbstractContextManager[V]]) -> Callable[P, Block[V]]:
    """A method that makes something for the time of a `with` block."""

    @functools.wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> Block[V]:
        return Block(make(*args, **options), f"with client.{make.__name__}(…) as")

    return made


def async_block(make: Callable[P, AbstractAsyncContextManager[V]]) -> Callable[P, AsyncBlock[V]]:
    """As `block`, for `async with`."""

    @functools.wraps(make)
    def made(*args: P.args, **options: P.kwargs) -> AsyncBlock[V]:
        return AsyncBlock(make(*args, **options), f"async with client.{make.__name__}(…) as")

    return made


class _Unentered:
    """Something that is not there yet.

    Args:
        how: what to write to have it.
    """

    _how = ""

    def __init__(self, how: str) -> None:
        self._how = how

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"nothing is held yet, so there is no {name!r}: write `{self._how} …:`, or hold without a block with client.hold()")


class Block(_Unentered, AbstractContextManager[V]):
    """A `with` block that has not begun."""

    def __init__(self, inner: AbstractContextManager[V], how: str) -> None:
        super().__init__(how)
        self._inner = inner

    def __enter__(self) -> V:
        return self._inner.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool | None:
        return self._inner.__exit__(kind, error, traceback)


class AsyncBlock(_Unentered, AbstractAsyncContextManager[V]):
    """An `async with` block that has not begun."""

    def __init__(self, inner: AbstractAsyncContextManager[V], how: str) -> None:
        super().__init__(how)
        self._inner = inner

    async def __aenter__(self) -> V:
        return await self._inner.__aenter__()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool | None:
        return await self._inner.__aexit__(kind, error, traceback)

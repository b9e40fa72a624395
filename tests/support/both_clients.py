"""A blocking interface for both clients, so that one test covers both: every method blocks, and every stream is returned as a list."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any

from env_client import AsyncSandboxClient, RetryPolicy, SandboxClient

QUICK = RetryPolicy(base_s=0.001)
KINDS = ("sync", "async")


class Face:
    """A blocking interface for one client, or for one of its leases.

    Args:
        inner: a `SandboxClient` or `AsyncSandboxClient`, its operations, or one of its leases.
        runner: the event loop that runs the asynchronous methods.
    """

    def __init__(self, inner: Any, runner: asyncio.Runner) -> None:
        self.inner = inner
        self.runner = runner

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return functools.partial(self._call, found) if inspect.ismethod(found) else found

    def _call(self, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
        given = method(*args, **options)
        if inspect.iscoroutine(given):
            return self.runner.run(given)
        if isinstance(given, AsyncIterator):
            return self.runner.run(_collect(given))
        if isinstance(given, AbstractAsyncContextManager | AbstractContextManager):
            return self._block(given)
        return list(given) if isinstance(given, Iterator) else given

    @contextmanager
    def _block(self, manager: Any) -> Iterator[Any]:
        if isinstance(manager, AbstractContextManager):
            with manager as held:
                yield self._faces(held)
            return
        held = self.runner.run(_enter(manager))
        try:
            yield self._faces(held)
        except BaseException as error:
            if not self.runner.run(_leave(manager, error)):
                raise
        else:
            self.runner.run(_leave(manager, None))

    def _faces(self, held: Any) -> Any:
        return tuple(Face(lease, self.runner) for lease in held) if isinstance(held, tuple) else Face(held, self.runner)


async def _collect(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def _enter(manager: AbstractAsyncContextManager[Any]) -> Any:
    return await manager.__aenter__()


async def _leave(manager: AbstractAsyncContextManager[Any], error: BaseException | None) -> bool:
    return bool(await manager.__aexit__(None if error is None else type(error), error, None if error is None else error.__traceback__))


@contextmanager
def client_of(kind: str, url: str, token: str) -> Iterator[Face]:
    """A client of one kind, which repeats requests at once."""
    with asyncio.Runner() as runner:
        face = Face((SandboxClient if kind == "sync" else AsyncSandboxClient)(url, token, retry=QUICK), runner)
        try:
            yield face
        finally:
            face.close() if kind == "sync" else face.aclose()

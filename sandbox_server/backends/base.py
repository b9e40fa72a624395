"""The seam between a pool and where its sandboxes live: lifecycle only, never a command."""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from sandbox_server.core.pipe import Pipe
from sandbox_server.core.types import Handle, PoolSpec


class Health(enum.StrEnum):
    """What a backend can see of a sandbox from outside."""

    RUNNING = "running"
    GONE = "gone"
    UNKNOWN = "unknown"


class CreateFailed(Exception):
    """A sandbox could not be made.

    Args:
        detail: what happened, to what, and what to do.
        hopeless: trying again cannot help (the image does not exist, a driver is missing); waiters fail at once.
    """

    def __init__(self, detail: str, *, permanent: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.permanent = permanent


class RateLimited(CreateFailed):
    """The backend makes no more at present: a reason to wait, and nobody's error.

    Args:
        detail: what it said.
        retry_after_s: how long it asks for; None: it does not say.
    """

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class Backend(Protocol):
    """How a sandbox comes and goes. One object a backend, shared by its pools; every method may be called concurrently."""

    name: str

    def create(self, pool: str, spec: PoolSpec, sandbox_id: str) -> AsyncGenerator[Handle, None]:
        """Make one sandbox, yielding a handle after each step that left something behind.

        `pool` tells the pool from every other, of whatever tenant; it may hold a slash.
        The last handle has an `address`. Use it under `contextlib.aclosing`. Whatever was yielded last, `destroy` accepts.

        Raises:
            CreateFailed: it could not be made; what was yielded so far still has to be destroyed.
            RateLimited: not now; so does what was yielded so far.
        """
        ...

    async def destroy(self, handle: Handle) -> None:
        """Take away whatever the handle stands for, half-made or whole; returns when it is gone. A no-op where it is gone already.

        Raises:
            OSError: it is still there; try again.
        """
        ...

    async def check(self, handles: Sequence[Handle]) -> Mapping[str, Health]:
        """What became of these sandboxes, by sandbox id, in one go."""
        ...

    async def list_owned(self, owner: str) -> Sequence[Handle]:
        """Every sandbox of this owner that the backend knows, recorded or not.

        Raises:
            OSError, BackendUnavailable: it cannot be asked now; try again.
        """
        ...

    async def close(self) -> None:
        """Let go of connections and threads; sandboxes are left as they are."""
        ...


@runtime_checkable
class OpensPipes(Protocol):
    """What a backend has, too, whose handles may have a `stdio:` address: it can start a program in its sandboxes."""

    async def open_pipe(self, handle: Handle) -> Pipe:
        """Start the agent's relay, `python AGENT connect SOCKET`, in a sandbox that was created.

        Raises:
            OSError: it could not be started.
        """
        ...

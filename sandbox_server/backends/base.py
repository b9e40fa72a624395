"""The interface between a pool and the place where its sandboxes run.

A backend creates, observes, lists and destroys sandboxes. It never runs a command in one: commands go to the agent over a link.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from sandbox_server.core.pipe import Pipe
from sandbox_server.core.types import Handle, PoolId, PoolSpec


class ObservedState(enum.StrEnum):
    """The state of a sandbox as its backend reports it."""

    #: It is being created, and its agent does not run yet.
    STARTING = "starting"
    #: Its agent's process, container or virtual machine runs.
    RUNNING = "running"
    #: It has ended or was never created. A sandbox that is gone never comes back.
    GONE = "gone"
    #: The backend does not know the state now. Nothing may be concluded from this.
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """What a backend reports about one sandbox.

    Attributes:
        state: the state of the sandbox.
        detail: what happened, as part of a sentence; empty if there is nothing to add.
        evidence: what the state is based on, such as `exit_code` or `oom_killed`. JSON values only.
        ends_at: when the backend will end the sandbox by itself, in Unix seconds. None if it will not, or if it is not known.
    """

    state: ObservedState
    detail: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    ends_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendTraits:
    """What the service has to know about a backend in order to use it well.

    Attributes:
        lost_after_s: how long the agent of a sandbox that the backend reports as running may be unreachable before the sandbox counts as lost,
            in seconds.
        observe_interval_s: the shortest time between two calls of `observe`, in seconds.
        creations_at_once: how many sandboxes may be in creation at the same time.
        creations_per_s: how many creations may begin in one second.
        resets_at_once: how many slots may be reset at the same time, where all sandboxes share the processors of one machine; None: any number.
        acquires_at_once: how many acquires of ready slots may be granted within a few hundredths of a second, where all sandboxes share the processors of one
            machine; None: any number.
        ends_sandboxes: whether the backend ends sandboxes by itself, at the `ends_at` of their observations.
        evidence: the keys that the `evidence` of its observations may have.
    """

    lost_after_s: float = 5.0
    observe_interval_s: float = 0.1
    creations_at_once: int = 4
    creations_per_s: float = 10.0
    resets_at_once: int | None = None
    acquires_at_once: int | None = None
    ends_sandboxes: bool = False
    evidence: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class CreateContext:
    """Everything that a backend is given to create one sandbox.

    Attributes:
        pool_id: the pool that the sandbox is created for. Its `key` differs from that of every other pool, of every tenant, and may contain a slash.
        spec: the spec of that pool.
        sandbox_id: the id of the new sandbox.
    """

    pool_id: PoolId
    spec: PoolSpec
    sandbox_id: str


class CreateFailed(Exception):
    """A sandbox could not be created.

    Args:
        detail: what happened, to which sandbox or resource, and what to do about it.
        permanent: whether another attempt will fail as well, because the image does not exist or a driver is missing.
            Acquires that wait for a new sandbox are then refused at once.
    """

    def __init__(self, detail: str, *, permanent: bool = False) -> None:
        super().__init__(detail)
        self.detail = detail
        self.permanent = permanent


class RateLimited(CreateFailed):
    """The backend creates no more sandboxes at present. Creation is tried again later, and the limit is not reported as an error.

    Args:
        detail: what the backend responded.
        retry_after_s: how long it asks the service to wait, in seconds; None if it does not say.
    """

    def __init__(self, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_s = retry_after_s


class Backend(Protocol):
    """Creates, observes and destroys sandboxes. There is one object per backend, which its pools share; every method may be called concurrently.

    Attributes:
        name: the name of the backend in a pool's spec.
        traits: what the service has to know about the backend.
    """

    name: str
    traits: BackendTraits

    def create(self, context: CreateContext) -> AsyncGenerator[Handle, None]:
        """Create one sandbox, and yield a handle as a checkpoint after each step that left something behind.

        Use the generator under `contextlib.aclosing`. The last handle has an `address`. `destroy` accepts the handle that was yielded last,
        whichever step failed after it.

        Args:
            context: what to create.

        Raises:
            CreateFailed: the sandbox could not be created. What has been yielded so far still has to be destroyed.
            RateLimited: no sandbox can be created now. What has been yielded so far still has to be destroyed.
        """
        ...

    async def destroy(self, handle: Handle) -> None:
        """Destroy everything that the handle stands for, complete or half created, and return when it is gone. Does nothing if it is gone already.

        Args:
            handle: the last checkpoint of the sandbox.

        Raises:
            OSError, BackendUnavailable: the sandbox may still exist; call again later.
        """
        ...

    async def observe(self, handles: Sequence[Handle]) -> Mapping[str, Observation]:
        """Report the state of many sandboxes at once.

        Args:
            handles: the last checkpoints of the sandboxes.

        Returns:
            One observation for each sandbox id. A sandbox that is missing counts as `UNKNOWN`.

        Raises:
            OSError, BackendUnavailable: the backend cannot be asked now. This says nothing about the sandboxes.
        """
        ...

    async def list_owned(self, owner: str) -> Sequence[Handle]:
        """List every sandbox of an owner that the backend has, whether or not the service has a record of it.

        Args:
            owner: the name of the service that created the sandboxes.

        Raises:
            OSError, BackendUnavailable: the backend cannot be asked now; call again later.
        """
        ...

    async def close(self) -> None:
        """Close the backend's connections and threads. Sandboxes are left as they are."""
        ...


@runtime_checkable
class WatchesSandboxes(Protocol):
    """What a backend offers in addition if its control plane can report changes without being asked."""

    def watch(self) -> AsyncIterator[Mapping[str, Observation]]:
        """Report changes of this service's sandboxes, by sandbox id, until the iterator is closed.

        Raises:
            OSError, BackendUnavailable: the stream of changes has broken off; call again later. Changes may have been missed.
        """
        ...


@runtime_checkable
class OpensPipes(Protocol):
    """What a backend offers in addition if its handles may have a `stdio:` address: it can start a program in its sandboxes."""

    async def open_pipe(self, handle: Handle) -> Pipe:
        """Start the agent's relay, `python AGENT connect SOCKET`, in a sandbox that has been created.

        Args:
            handle: the last checkpoint of the sandbox.

        Raises:
            OSError: the relay could not be started.
        """
        ...

"""The contract's verbs of pools, sandboxes and the service itself, for an event loop and for threads."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from env_client import service_messages as messages
from env_client.progress import EventsProgress
from env_client.sending import AsyncSender, SyncSender
from env_client.values import Event, Page, PoolChange, PoolInfo, Readiness, SandboxInfo, VerifyReport


class AsyncServiceVerbs:
    """What can be asked of the service as a whole."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender

    async def pools(self) -> tuple[PoolInfo, ...]:
        """All pools."""
        page = await self._sender.send(messages.pools())
        found = page.items
        while page.next_cursor is not None:
            page = await self._sender.send(messages.pools(page.next_cursor))
            found += page.items
        return found

    async def pool(self, name: str) -> PoolInfo:
        """One pool."""
        return await self._sender.send(messages.pool(name))

    async def pool_put(self, name: str, spec: Mapping[str, Any]) -> PoolChange:
        """Make a pool, or change it to be of this spec.

        Args:
            name: its name.
            spec: the whole of it; a missing field has its default.

        Raises:
            PoolConflict: its backend would change, or it is one of the settings file.
            Forbidden: the spec needs an admin, or passes a limit for those who are none.
        """
        return await self._sender.send(messages.pool_put(name, spec))

    async def pool_delete(self, name: str, *, force: bool = False) -> None:
        """Drain a pool, after which it is gone.

        Args:
            name: which.
            force: do not wait for its leases.
        """
        await self._sender.send(messages.pool_delete(name, force))

    async def pool_verify(self, name: str) -> VerifyReport:
        """Plant leftovers of every kind in the pool's free slots, reset them, and report what was found.

        Raises:
            NoCapacity: no slot is free.
        """
        return await self._sender.send(messages.pool_verify(name))

    async def sandboxes(self, *, limit: int | None = None, cursor: str | None = None) -> Page[SandboxInfo]:
        """A page of the sandboxes."""
        return await self._sender.send(messages.sandboxes(limit, cursor))

    async def iter_sandboxes(self) -> AsyncIterator[SandboxInfo]:
        """All of them, page by page."""
        page = await self.sandboxes()
        while True:
            for info in page.items:
                yield info
            if page.next_cursor is None:
                return
            page = await self.sandboxes(cursor=page.next_cursor)

    async def sandbox_drain(self, sandbox_id: str) -> SandboxInfo:
        """Give no new leases in a sandbox; it is gone when the last one ends."""
        return await self._sender.send(messages.sandbox_drain(sandbox_id))

    def events(self, *, after: str | None = None) -> AsyncIterator[Event]:
        """Everything that changes, as it changes, without an end. A cut connection is taken up again after the last event.

        Args:
            after: the id of the last event seen before; default: from now on.
        """
        return self._sender.follow(EventsProgress(after))

    async def metrics(self) -> str:
        """The service's figures, as Prometheus reads them."""
        return await self._sender.send(messages.metrics())

    async def agent_pyz(self) -> bytes:
        """The agent that runs inside sandboxes, as one file that Python runs."""
        return await self._sender.send(messages.agent_pyz())

    async def agent_pyz_to(self, target: str | os.PathLike[str]) -> int:
        """Stream the agent into a local file. Returns its size in bytes."""
        return await self._sender.save(messages.agent_pyz(), Path(target))

    async def healthz(self) -> Mapping[str, Any]:
        """Whether the service is alive: `{"status": "ok"}`."""
        return await self._sender.send(messages.healthz())

    async def readyz(self, pool: str | None = None) -> Readiness:
        """Whether the service, or one of its pools, is ready. Not ready is an answer, not an error."""
        return await self._sender.send(messages.readyz(pool))


class ServiceVerbs:
    """As `AsyncServiceVerbs`, blocking, for any number of threads."""

    def __init__(self, sender: SyncSender) -> None:
        self._sender = sender

    def pools(self) -> tuple[PoolInfo, ...]:
        """As `AsyncServiceVerbs.pools`."""
        page = self._sender.send(messages.pools())
        found = page.items
        while page.next_cursor is not None:
            page = self._sender.send(messages.pools(page.next_cursor))
            found += page.items
        return found

    def pool(self, name: str) -> PoolInfo:
        """As `AsyncServiceVerbs.pool`."""
        return self._sender.send(messages.pool(name))

    def pool_put(self, name: str, spec: Mapping[str, Any]) -> PoolChange:
        """As `AsyncServiceVerbs.pool_put`."""
        return self._sender.send(messages.pool_put(name, spec))

    def pool_delete(self, name: str, *, force: bool = False) -> None:
        """As `AsyncServiceVerbs.pool_delete`."""
        self._sender.send(messages.pool_delete(name, force))

    def pool_verify(self, name: str) -> VerifyReport:
        """As `AsyncServiceVerbs.pool_verify`."""
        return self._sender.send(messages.pool_verify(name))

    def sandboxes(self, *, limit: int | None = None, cursor: str | None = None) -> Page[SandboxInfo]:
        """As `AsyncServiceVerbs.sandboxes`."""
        return self._sender.send(messages.sandboxes(limit, cursor))

    def iter_sandboxes(self) -> Iterator[SandboxInfo]:
        """As `AsyncServiceVerbs.iter_sandboxes`."""
        page = self.sandboxes()
        while True:
            yield from page.items
            if page.next_cursor is None:
                return
            page = self.sandboxes(cursor=page.next_cursor)

    def sandbox_drain(self, sandbox_id: str) -> SandboxInfo:
        """As `AsyncServiceVerbs.sandbox_drain`."""
        return self._sender.send(messages.sandbox_drain(sandbox_id))

    def events(self, *, after: str | None = None) -> Iterator[Event]:
        """As `AsyncServiceVerbs.events`."""
        return self._sender.follow(EventsProgress(after))

    def metrics(self) -> str:
        """As `AsyncServiceVerbs.metrics`."""
        return self._sender.send(messages.metrics())

    def agent_pyz(self) -> bytes:
        """As `AsyncServiceVerbs.agent_pyz`."""
        return self._sender.send(messages.agent_pyz())

    def agent_pyz_to(self, target: str | os.PathLike[str]) -> int:
        """As `AsyncServiceVerbs.agent_pyz_to`."""
        return self._sender.save(messages.agent_pyz(), Path(target))

    def healthz(self) -> Mapping[str, Any]:
        """As `AsyncServiceVerbs.healthz`."""
        return self._sender.send(messages.healthz())

    def readyz(self, pool: str | None = None) -> Readiness:
        """As `AsyncServiceVerbs.readyz`."""
        return self._sender.send(messages.readyz(pool))

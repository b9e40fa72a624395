"""The contract's verbs of pools, sandboxes and the service itself, for an event loop and for threads."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from env_client.messages import service as messages
from env_client.transport.progress import EventsProgress
from env_client.transport.sending import AsyncSender, SyncSender
from env_client.values import Event, Page, PoolChange, PoolInfo, Readiness, SandboxInfo, VerifyReport


class AsyncServiceVerbs:
    """What can be asked of the service as a whole."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender

    async def pools(self, *, tenant: str | None = None) -> tuple[PoolInfo, ...]:
        """Your pools, and those that are shared: whatever a name means to you.

        Args:
            tenant: instead, those that this tenant owns; `*`: all there are. For admins.
        """
        page = await self._sender.send(messages.pools(None, tenant))
        found = page.items
        while page.next_cursor is not None:
            page = await self._sender.send(messages.pools(page.next_cursor, tenant))
            found += page.items
        return found

    async def pool(self, name: str, *, tenant: str | None = None) -> PoolInfo:
        """One pool: your own of that name, else the shared one.

        Args:
            name: its name.
            tenant: whose it is instead; for admins.
        """
        return await self._sender.send(messages.pool(name, tenant))

    async def pool_put(self, name: str, spec: Mapping[str, Any], *, tenant: str | None = None) -> PoolChange:
        """Make a pool of your own, or change it to be of this spec.

        Args:
            name: its name.
            spec: the whole of it; a missing field has its default.
            tenant: whose it is instead; for admins.

        Raises:
            PoolConflict: its backend would change, or a shared pool has the name.
            Forbidden: the spec needs an admin, or a backend that is not for you.
            QuotaExceeded: your pools would promise or reserve more slots than you may have.
        """
        return await self._sender.send(messages.pool_put(name, spec, tenant))

    async def pool_delete(self, name: str, *, tenant: str | None = None, force: bool = False) -> None:
        """Drain a pool, after which it is gone.

        Args:
            name: which.
            tenant: whose it is, where it is not yours; for admins.
            force: do not wait for its leases.
        """
        await self._sender.send(messages.pool_delete(name, force, tenant))

    async def pool_verify(self, name: str, *, tenant: str | None = None) -> VerifyReport:
        """Plant leftovers of every kind in the pool's free slots, reset them, and report what was found.

        Args:
            name: which.
            tenant: whose it is, where it is not yours.

        Raises:
            NoCapacity: no slot is free.
        """
        return await self._sender.send(messages.pool_verify(name, tenant))

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

    def pools(self, *, tenant: str | None = None) -> tuple[PoolInfo, ...]:
        """As `AsyncServiceVerbs.pools`."""
        page = self._sender.send(messages.pools(None, tenant))
        found = page.items
        while page.next_cursor is not None:
            page = self._sender.send(messages.pools(page.next_cursor, tenant))
            found += page.items
        return found

    def pool(self, name: str, *, tenant: str | None = None) -> PoolInfo:
        """As `AsyncServiceVerbs.pool`."""
        return self._sender.send(messages.pool(name, tenant))

    def pool_put(self, name: str, spec: Mapping[str, Any], *, tenant: str | None = None) -> PoolChange:
        """As `AsyncServiceVerbs.pool_put`."""
        return self._sender.send(messages.pool_put(name, spec, tenant))

    def pool_delete(self, name: str, *, tenant: str | None = None, force: bool = False) -> None:
        """As `AsyncServiceVerbs.pool_delete`."""
        self._sender.send(messages.pool_delete(name, force, tenant))

    def pool_verify(self, name: str, *, tenant: str | None = None) -> VerifyReport:
        """As `AsyncServiceVerbs.pool_verify`."""
        return self._sender.send(messages.pool_verify(name, tenant))

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

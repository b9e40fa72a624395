"""The client methods for pools, sandboxes and the service itself; the asynchronous method has the complete description."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

from env_client.messages import service as messages
from env_client.transport.resumable_streams import ServiceEventStream
from env_client.transport.senders import AsyncSender, SyncSender
from env_client.values import Event, Page, PoolChange, PoolInfo, Readiness, SandboxInfo, VerifyReport


class AsyncServiceOperations:
    """Requests that concern no single lease."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender

    async def pools(self, *, tenant: str | None = None) -> tuple[PoolInfo, ...]:
        """List the pools that the tenant can use: its own, and the shared ones whose names it does not use itself.

        Args:
            tenant: list the pools that this tenant owns instead, or all pools with `*`. For admins.
        """
        page = await self._sender.send(messages.list_pools_message(None, tenant))
        found = page.items
        while page.next_cursor is not None:
            page = await self._sender.send(messages.list_pools_message(page.next_cursor, tenant))
            found += page.items
        return found

    async def pool(self, name: str, *, tenant: str | None = None) -> PoolInfo:
        """Return one pool: the tenant's own pool of that name, else the shared one.

        Args:
            name: the name of the pool.
            tenant: the owner of the pool, if it is another tenant. For admins.
        """
        return await self._sender.send(messages.get_pool_message(name, tenant))

    async def pool_put(self, name: str, spec: Mapping[str, Any], *, tenant: str | None = None) -> PoolChange:
        """Create a pool, or change it to have this spec.

        Args:
            name: the name of the pool.
            spec: the complete spec; a missing field has its default.
            tenant: the owner of the pool, if it is another tenant. For admins.

        Raises:
            PoolConflict: the backend would change, or a shared pool has the name.
            Forbidden: the spec needs an admin, or names a backend that the tenant may not use.
            QuotaExceeded: the tenant's pools would hold more slots than the tenant may have.
        """
        return await self._sender.send(messages.put_pool_message(name, spec, tenant))

    async def pool_delete(self, name: str, *, tenant: str | None = None, force: bool = False) -> None:
        """Drain a pool and delete it once its last lease has ended.

        Args:
            name: the name of the pool.
            tenant: the owner of the pool, if it is another tenant. For admins.
            force: end the leases of the pool at once.
        """
        await self._sender.send(messages.delete_pool_message(name, force, tenant))

    async def pool_verify(self, name: str, *, tenant: str | None = None) -> VerifyReport:
        """Plant leftovers of every kind in the free slots of a pool, reset the slots, and report the traces that were found.

        Args:
            name: the name of the pool.
            tenant: the owner of the pool, if it is another tenant. For admins.

        Raises:
            NoCapacity: no slot is free.
        """
        return await self._sender.send(messages.verify_pool_message(name, tenant))

    async def sandboxes(self, *, limit: int | None = None, cursor: str | None = None) -> Page[SandboxInfo]:
        """Return one page of the sandboxes."""
        return await self._sender.send(messages.list_sandboxes_message(limit, cursor))

    async def iter_sandboxes(self) -> AsyncIterator[SandboxInfo]:
        """Yield the sandboxes of all pages of `sandboxes`."""
        page = await self.sandboxes()
        while True:
            for info in page.items:
                yield info
            if page.next_cursor is None:
                return
            page = await self.sandboxes(cursor=page.next_cursor)

    async def sandbox_drain(self, sandbox_id: str) -> SandboxInfo:
        """Drain a sandbox: it gives no new leases, and is deleted when its last lease ends."""
        return await self._sender.send(messages.drain_sandbox_message(sandbox_id))

    def events(self, *, after: str | None = None) -> AsyncIterator[Event]:
        """Yield every change in the service as it happens. The stream never ends; after a lost connection, it is resumed after the last event.

        Args:
            after: the id of the last event seen before; default only new events.
        """
        return self._sender.follow(ServiceEventStream(after))

    async def metrics(self) -> str:
        """Return the metrics of the service in the text format of Prometheus."""
        return await self._sender.send(messages.metrics_message())

    async def agent_pyz(self) -> bytes:
        """Return the agent that runs inside sandboxes, as a Python zip application."""
        return await self._sender.send(messages.agent_pyz_message())

    async def agent_pyz_to(self, target: str | os.PathLike[str]) -> int:
        """Stream the agent into a local file. Returns the size in bytes."""
        return await self._sender.save(messages.agent_pyz_message(), Path(target))

    async def healthz(self) -> Mapping[str, Any]:
        """Return `{"status": "ok"}` if the service is alive."""
        return await self._sender.send(messages.healthz_message())

    async def readyz(self, pool: str | None = None) -> Readiness:
        """Return whether the service, or one of its pools, is ready. A service that is not ready raises no error."""
        return await self._sender.send(messages.readyz_message(pool))


class ServiceOperations:
    """The blocking counterpart of `AsyncServiceOperations`, for use by any number of threads."""

    def __init__(self, sender: SyncSender) -> None:
        self._sender = sender

    def pools(self, *, tenant: str | None = None) -> tuple[PoolInfo, ...]:
        """See `AsyncServiceOperations.pools`."""
        page = self._sender.send(messages.list_pools_message(None, tenant))
        found = page.items
        while page.next_cursor is not None:
            page = self._sender.send(messages.list_pools_message(page.next_cursor, tenant))
            found += page.items
        return found

    def pool(self, name: str, *, tenant: str | None = None) -> PoolInfo:
        """See `AsyncServiceOperations.pool`."""
        return self._sender.send(messages.get_pool_message(name, tenant))

    def pool_put(self, name: str, spec: Mapping[str, Any], *, tenant: str | None = None) -> PoolChange:
        """See `AsyncServiceOperations.pool_put`."""
        return self._sender.send(messages.put_pool_message(name, spec, tenant))

    def pool_delete(self, name: str, *, tenant: str | None = None, force: bool = False) -> None:
        """See `AsyncServiceOperations.pool_delete`."""
        self._sender.send(messages.delete_pool_message(name, force, tenant))

    def pool_verify(self, name: str, *, tenant: str | None = None) -> VerifyReport:
        """See `AsyncServiceOperations.pool_verify`."""
        return self._sender.send(messages.verify_pool_message(name, tenant))

    def sandboxes(self, *, limit: int | None = None, cursor: str | None = None) -> Page[SandboxInfo]:
        """See `AsyncServiceOperations.sandboxes`."""
        return self._sender.send(messages.list_sandboxes_message(limit, cursor))

    def iter_sandboxes(self) -> Iterator[SandboxInfo]:
        """See `AsyncServiceOperations.iter_sandboxes`."""
        page = self.sandboxes()
        while True:
            yield from page.items
            if page.next_cursor is None:
                return
            page = self.sandboxes(cursor=page.next_cursor)

    def sandbox_drain(self, sandbox_id: str) -> SandboxInfo:
        """See `AsyncServiceOperations.sandbox_drain`."""
        return self._sender.send(messages.drain_sandbox_message(sandbox_id))

    def events(self, *, after: str | None = None) -> Iterator[Event]:
        """See `AsyncServiceOperations.events`."""
        return self._sender.follow(ServiceEventStream(after))

    def metrics(self) -> str:
        """See `AsyncServiceOperations.metrics`."""
        return self._sender.send(messages.metrics_message())

    def agent_pyz(self) -> bytes:
        """See `AsyncServiceOperations.agent_pyz`."""
        return self._sender.send(messages.agent_pyz_message())

    def agent_pyz_to(self, target: str | os.PathLike[str]) -> int:
        """See `AsyncServiceOperations.agent_pyz_to`."""
        return self._sender.save(messages.agent_pyz_message(), Path(target))

    def healthz(self) -> Mapping[str, Any]:
        """See `AsyncServiceOperations.healthz`."""
        return self._sender.send(messages.healthz_message())

    def readyz(self, pool: str | None = None) -> Readiness:
        """See `AsyncServiceOperations.readyz`."""
        return self._sender.send(messages.readyz_message(pool))

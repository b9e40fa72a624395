"""Files of a slot: bytes from and to its agent, streamed, never held."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sandbox_server.agent import wire
from sandbox_server.core.errors import (
    BackendUnavailable,
    FileError,
    FileNotFound,
    InvalidRequest,
    LeaseLost,
    LeaseNotFound,
    NotImplementedHere,
    PoolServiceError,
)
from sandbox_server.dispatch.slot_location import SlotLocator, slot_meta
from sandbox_server.link.agent_link import RESPONSE_TIMEOUT_S, AgentStream
from sandbox_server.link.errors import AgentRefused, AgentSilent, LinkLost

LOST_WAIT_S = 10.0
"""How long to wait for the pool to find out what a lost link means, in seconds."""


class SlotFiles:
    """The files of leased slots.

    Args:
        routes: finds the slot of a lease.

    Every method raises LeaseNotFound, LeaseLost or SandboxLost where the lease does not hold, BackendUnavailable where the agent cannot be reached,
    FileNotFound, FileError and InvalidRequest (the path leads out) as the slot finds the path.
    """

    def __init__(self, routes: SlotLocator) -> None:
        self._routes = routes

    async def read(self, tenant: str, lease_id: str, path: str) -> AsyncGenerator[bytes, None]:
        """The content of one file, as it comes."""
        async for chunk in self._receive(tenant, lease_id, "file_get", path):
            yield chunk

    async def read_archive(self, tenant: str, lease_id: str, path: str) -> AsyncGenerator[bytes, None]:
        """A tree as a gzipped tar, as it comes."""
        async for chunk in self._receive(tenant, lease_id, "archive_get", path):
            yield chunk

    async def write(self, tenant: str, lease_id: str, path: str, mode: int | None, chunks: AsyncIterator[bytes]) -> None:
        """Replace one file, atomically, with these bytes."""
        more = {} if mode is None else {"mode": mode}
        await self._send(tenant, lease_id, "file_put", path, chunks, **more)

    async def write_archive(self, tenant: str, lease_id: str, path: str, chunks: AsyncIterator[bytes]) -> None:
        """Unpack a gzipped tar into a folder."""
        await self._send(tenant, lease_id, "archive_put", path, chunks)

    async def entries(self, tenant: str, lease_id: str, path: str, *, recursive: bool, max_entries: int) -> tuple[list[dict[str, Any]], bool]:
        """What a folder holds, and whether that is not all of it."""
        entries: list[dict[str, Any]] = []
        is_cut = False
        async with self._stream(tenant, lease_id, "file_list", path, recursive=recursive, max_entries=max_entries) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Item):
                    found = event.meta.get("entries")
                    entries.extend(entry for entry in (found if isinstance(found, list) else ()) if isinstance(entry, dict))
                    is_cut = is_cut or event.meta.get("truncated") is True
        return entries[:max_entries], is_cut or len(entries) > max_entries

    async def _receive(self, tenant: str, lease_id: str, op: str, path: str) -> AsyncGenerator[bytes, None]:
        async with self._stream(tenant, lease_id, op, path) as stream:
            stream.end()
            async for event in stream:
                if isinstance(event, wire.Data):
                    yield event.body

    async def _send(self, tenant: str, lease_id: str, op: str, path: str, chunks: AsyncIterator[bytes], **more: Any) -> None:
        async with self._stream(tenant, lease_id, op, path, **more) as stream:
            async for chunk in chunks:
                await stream.send_data(chunk)
            stream.end()
            async for _ in stream:
                pass

    @asynccontextmanager
    async def _stream(self, tenant: str, lease_id: str, op: str, path: str, **more: Any) -> AsyncIterator[AgentStream]:
        route = self._routes.route(tenant, lease_id)
        try:
            async with route.agent.link.stream(slot_meta(route, op, path=path, **more), RESPONSE_TIMEOUT_S) as stream:
                yield stream
        except AgentSilent as silent:
            raise BackendUnavailable(f"the agent cannot be reached: {silent}") from None
        except LinkLost as lost:
            error = await self._routes.wait_for_reconnect_or_loss(lease_id, LOST_WAIT_S)
            raise error or BackendUnavailable(f"the agent cannot be reached: {lost}") from None
        except AgentRefused as refused:
            raise self._translate(tenant, lease_id, refused) from None

    def _translate(self, tenant: str, lease_id: str, refused: AgentRefused) -> PoolServiceError:
        """The one place where the agent's refusals about files become errors of the contract."""
        if refused.code == "file_not_found":
            return FileNotFound(refused.detail)
        if refused.code == "file_error":
            return FileError(refused.detail, errno=refused.meta.get("errno"))
        if refused.code in ("path_outside", "invalid"):
            return InvalidRequest(refused.detail, field="path")
        if refused.code == "not_implemented":
            return NotImplementedHere(refused.detail)
        try:
            self._routes.route(tenant, lease_id)
        except (LeaseNotFound, LeaseLost) as error:
            return error
        return BackendUnavailable(f"the agent refused: {refused.detail}")

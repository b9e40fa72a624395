"""Reads and writes files of slots for clients. The content is streamed between client and agent and never held in memory as a whole."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

from sandbox_server.dispatch.agent_errors import translated_link_errors
from sandbox_server.dispatch.slot_locator import SlotLocator
from sandbox_server.link.slot_client import SlotClient

FILES_LOST_LINK_WAIT_S = 10.0
"""After a lost link: how long a request about files waits for the pool to find out whether the sandbox is lost, in seconds."""


class SlotFiles:
    """Reads and writes the files of leased slots.

    Args:
        slot_locator: finds the slot of a lease.

    Every method raises LeaseNotFound, LeaseLost or SandboxLost where the lease does not hold, BackendUnavailable where the agent cannot be reached,
    and FileNotFound, FileError or InvalidRequest (the path leads out of the slot) where the agent cannot do it.
    """

    def __init__(self, slot_locator: SlotLocator) -> None:
        self._slot_locator = slot_locator

    def read_file(self, tenant: str, lease_id: str, path: str, on_size: Callable[[int], None] = lambda size_bytes: None) -> AsyncGenerator[bytes, None]:
        """Receive the content of a file.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease that holds the slot.
            path: the file.
            on_size: called with the size of the content in bytes before the first part of it, unless the agent does not tell it.
        """
        return self._receive(tenant, lease_id, lambda slot: slot.read_file(path, on_size))

    def read_recording(self, tenant: str, lease_id: str, name: str, on_size: Callable[[int], None] = lambda size_bytes: None) -> AsyncGenerator[bytes, None]:
        """Receive the recording of a terminal. The arguments are those of `read_file`, with the name of the recording instead of a path."""
        return self._receive(tenant, lease_id, lambda slot: slot.read_recording(name, on_size))

    def read_archive(self, tenant: str, lease_id: str, path: str) -> AsyncGenerator[bytes, None]:
        """Receive a folder as a gzipped tar. The arguments are those of `read_file`, without the size, which is not known beforehand."""
        return self._receive(tenant, lease_id, lambda slot: slot.read_archive(path))

    async def write_file(self, tenant: str, lease_id: str, path: str, mode: int | None, chunks: AsyncIterator[bytes]) -> None:
        """Replace a file atomically.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease that holds the slot.
            path: the file.
            mode: its permission bits; None for the default.
            chunks: its content.
        """
        slot = self._slot_locator.locate_slot(tenant, lease_id).slot
        async with self._translated_errors(tenant, lease_id):
            await slot.write_file(path, mode, chunks)

    async def write_archive(self, tenant: str, lease_id: str, path: str, chunks: AsyncIterator[bytes]) -> None:
        """Unpack a gzipped tar into a folder. The arguments are those of `write_file`."""
        slot = self._slot_locator.locate_slot(tenant, lease_id).slot
        async with self._translated_errors(tenant, lease_id):
            await slot.write_archive(path, chunks)

    async def list_folder(self, tenant: str, lease_id: str, path: str, *, recursive: bool, max_entries: int) -> tuple[list[dict[str, Any]], bool]:
        """List the entries of a folder.

        Args:
            tenant: the tenant that sends the request.
            lease_id: the lease that holds the slot.
            path: the folder.
            recursive: whether to list the folders below it, too.
            max_entries: the largest number of entries to return.

        Returns:
            The entries, and whether there are more.
        """
        slot = self._slot_locator.locate_slot(tenant, lease_id).slot
        async with self._translated_errors(tenant, lease_id):
            listing = await slot.list_folder(path, recursive=recursive, max_entries=max_entries)
        return list(listing.entries), listing.is_truncated

    async def _receive(self, tenant: str, lease_id: str, read: Callable[[SlotClient], AsyncGenerator[bytes, None]]) -> AsyncGenerator[bytes, None]:
        slot = self._slot_locator.locate_slot(tenant, lease_id).slot
        async with self._translated_errors(tenant, lease_id), aclosing(read(slot)) as chunks:
            async for chunk in chunks:
                yield chunk

    def _translated_errors(self, tenant: str, lease_id: str) -> AbstractAsyncContextManager[None]:
        return translated_link_errors(self._slot_locator, tenant, lease_id, wait_s=FILES_LOST_LINK_WAIT_S)

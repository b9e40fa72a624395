"""The contract's verbs, for an event loop and for threads. A verb builds its message and sends it; what it means is said once, at the asynchronous one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from env_client import messages
from env_client.batches import BatchProgress
from env_client.sending import AsyncSender, SyncSender
from env_client.uploads import AsyncSource, Source, Upload
from env_client.values import (
    Acquired,
    AcquireOptions,
    Call,
    CallOptions,
    FileEntry,
    LeaseInfo,
    LeasePage,
    PoolInfo,
    Readiness,
    Released,
    Renewed,
    Result,
)


class AsyncVerbs:
    """What can be asked of the service. Every verb raises a `SandboxError`: a `ServiceError` for an answer, a `TransportError` for none."""

    def __init__(self, sender: AsyncSender) -> None:
        self._sender = sender

    async def acquire(self, pool: str | None = None, count: int = 1, **options: Unpack[AcquireOptions]) -> Acquired:
        """Acquire slots: all `count` of them or none. Nothing renews these leases; `lease` and `gang` do.

        Args:
            pool: whose slots; default the service's default pool.
            count: how many.
            options: see `AcquireOptions`.

        Raises:
            NoCapacity: none came free in `wait_s`.
            InvalidRequest: the pool can never hold so many, or an option is wrong.
            PoolNotFound, Draining, BackendUnavailable, QuotaExceeded: as they say.
        """
        return await self._sender.send(messages.acquire(pool, count, **options))

    async def exec(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """Run one tool call.

        Args:
            lease_id: in whose slot.
            tool: its name, such as `bash`.
            args: its arguments.
            options: see `CallOptions`.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: there is no such lease any longer.
        """
        return await self._sender.send(messages.exec_one(messages.make_call(lease_id, tool, args, **options)))

    async def exec_batch(self, calls: Iterable[Call]) -> tuple[Result, ...]:
        """Run many calls over many leases; results in the order of the calls. What is wrong with one call is that call's own result.

        Args:
            calls: 1 to 1,000; those of one lease run in the order given, different leases side by side.
        """
        return await self._sender.send(messages.exec_batch(messages.named(calls)))

    def exec_stream(self, calls: Iterable[Call]) -> AsyncIterator[tuple[int, Result]]:
        """As `exec_batch`, but each result as soon as it is there, with its place in the batch."""
        return self._sender.batch(BatchProgress(calls))

    async def release(self, lease_ids: Iterable[str] | None = None, *, run_id: str | None = None, reset_workspace: bool = True) -> Released:
        """Give slots back.

        Args:
            lease_ids: which; or
            run_id: all of a run's.
            reset_workspace: False keeps the files for the run's next acquire.
        """
        return await self._sender.send(messages.release(lease_ids, run_id, reset_workspace))

    async def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> Renewed:
        """Have leases hold for `ttl_s` seconds from now (default 300); never shortens. Those that are over are in `lost`."""
        return await self._sender.send(messages.renew(lease_ids, ttl_s))

    async def cancel(self, lease_id: str, call_id: str) -> Result:
        """End a call that runs; its result, which is `cancelled` unless it had ended by itself."""
        return await self._sender.send(messages.cancel(lease_id, call_id))

    async def lease_info(self, lease_id: str) -> LeaseInfo:
        """A lease as it is now."""
        return await self._sender.send(messages.lease_info(lease_id))

    async def leases(self, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int | None = None, cursor: str | None = None) -> LeasePage:
        """A page of one's leases, all or those of a run or trajectory."""
        return await self._sender.send(messages.leases(run_id, trajectory_id, limit, cursor))

    async def iter_leases(self, *, run_id: str | None = None, trajectory_id: str | None = None) -> AsyncIterator[LeaseInfo]:
        """All of them, page by page."""
        page = await self.leases(run_id=run_id, trajectory_id=trajectory_id)
        while True:
            for info in page.leases:
                yield info
            if page.next_cursor is None:
                return
            page = await self.leases(run_id=run_id, trajectory_id=trajectory_id, cursor=page.next_cursor)

    async def get_file(self, lease_id: str, path: str) -> bytes:
        """A file of the slot. Paths are in the workspace, or absolute in it or in the slot's `/tmp`.

        Raises:
            FileNotFound, FileError, InvalidRequest: no such file; a directory, device …; a path that leads out.
        """
        return await self._sender.send(messages.get_file(lease_id, path))

    async def get_file_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a file of the slot into a local one, which is replaced once all is there. Returns its size in bytes."""
        return await self._sender.save(messages.get_file(lease_id, path), Path(target))

    def stream_file(self, lease_id: str, path: str) -> AsyncIterator[bytes]:
        """A file of the slot, piece by piece."""
        return self._sender.stream(messages.get_file(lease_id, path))

    async def put_file(self, lease_id: str, path: str, source: AsyncSource, *, mode: int | None = None) -> None:
        """Write a file of the slot, atomically.

        Args:
            lease_id: in whose slot.
            path: where.
            source: bytes, a local path, an open binary file, or chunks. Only what can be read twice is sent again after a cut connection.
            mode: its permissions, such as 0o755.
        """
        await self._sender.send(messages.put_file(lease_id, path, mode), Upload(source))

    async def list_files(self, lease_id: str, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """The entries of a folder of the slot."""
        return await self._sender.send(messages.list_files(lease_id, path, recursive))

    async def get_archive(self, lease_id: str, path: str = ".") -> bytes:
        """A tree of the slot as a gzipped tar."""
        return await self._sender.send(messages.get_archive(lease_id, path))

    async def get_archive_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a tree of the slot into a local `.tar.gz`, which is replaced once all is there. Returns its size in bytes."""
        return await self._sender.save(messages.get_archive(lease_id, path), Path(target))

    def stream_archive(self, lease_id: str, path: str = ".") -> AsyncIterator[bytes]:
        """A tree of the slot as a gzipped tar, piece by piece."""
        return self._sender.stream(messages.get_archive(lease_id, path))

    async def put_archive(self, lease_id: str, path: str, source: AsyncSource) -> None:
        """Unpack a gzipped tar under a folder of the slot; `source` as in `put_file`."""
        await self._sender.send(messages.put_archive(lease_id, path), Upload(source))

    async def pools(self) -> tuple[PoolInfo, ...]:
        """All pools."""
        return await self._sender.send(messages.pools())

    async def pool(self, name: str) -> PoolInfo:
        """One pool."""
        return await self._sender.send(messages.pool(name))

    async def healthz(self) -> Mapping[str, Any]:
        """Whether the service is alive: `{"status": "ok"}`."""
        return await self._sender.send(messages.healthz())

    async def readyz(self, pool: str | None = None) -> Readiness:
        """Whether the service, or one of its pools, is ready. Not ready is an answer, not an error."""
        return await self._sender.send(messages.readyz(pool))


class Verbs:
    """As `AsyncVerbs`, blocking, for any number of threads."""

    def __init__(self, sender: SyncSender) -> None:
        self._sender = sender

    def acquire(self, pool: str | None = None, count: int = 1, **options: Unpack[AcquireOptions]) -> Acquired:
        """As `AsyncVerbs.acquire`."""
        return self._sender.send(messages.acquire(pool, count, **options))

    def exec(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """As `AsyncVerbs.exec`."""
        return self._sender.send(messages.exec_one(messages.make_call(lease_id, tool, args, **options)))

    def exec_batch(self, calls: Iterable[Call]) -> tuple[Result, ...]:
        """As `AsyncVerbs.exec_batch`."""
        return self._sender.send(messages.exec_batch(messages.named(calls)))

    def exec_stream(self, calls: Iterable[Call]) -> Iterator[tuple[int, Result]]:
        """As `AsyncVerbs.exec_stream`."""
        return self._sender.batch(BatchProgress(calls))

    def release(self, lease_ids: Iterable[str] | None = None, *, run_id: str | None = None, reset_workspace: bool = True) -> Released:
        """As `AsyncVerbs.release`."""
        return self._sender.send(messages.release(lease_ids, run_id, reset_workspace))

    def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> Renewed:
        """As `AsyncVerbs.renew`."""
        return self._sender.send(messages.renew(lease_ids, ttl_s))

    def cancel(self, lease_id: str, call_id: str) -> Result:
        """As `AsyncVerbs.cancel`."""
        return self._sender.send(messages.cancel(lease_id, call_id))

    def lease_info(self, lease_id: str) -> LeaseInfo:
        """As `AsyncVerbs.lease_info`."""
        return self._sender.send(messages.lease_info(lease_id))

    def leases(self, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int | None = None, cursor: str | None = None) -> LeasePage:
        """As `AsyncVerbs.leases`."""
        return self._sender.send(messages.leases(run_id, trajectory_id, limit, cursor))

    def iter_leases(self, *, run_id: str | None = None, trajectory_id: str | None = None) -> Iterator[LeaseInfo]:
        """As `AsyncVerbs.iter_leases`."""
        page = self.leases(run_id=run_id, trajectory_id=trajectory_id)
        while True:
            yield from page.leases
            if page.next_cursor is None:
                return
            page = self.leases(run_id=run_id, trajectory_id=trajectory_id, cursor=page.next_cursor)

    def get_file(self, lease_id: str, path: str) -> bytes:
        """As `AsyncVerbs.get_file`."""
        return self._sender.send(messages.get_file(lease_id, path))

    def get_file_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """As `AsyncVerbs.get_file_to`."""
        return self._sender.save(messages.get_file(lease_id, path), Path(target))

    def stream_file(self, lease_id: str, path: str) -> Iterator[bytes]:
        """As `AsyncVerbs.stream_file`."""
        return self._sender.stream(messages.get_file(lease_id, path))

    def put_file(self, lease_id: str, path: str, source: Source, *, mode: int | None = None) -> None:
        """As `AsyncVerbs.put_file`."""
        self._sender.send(messages.put_file(lease_id, path, mode), Upload(source))

    def list_files(self, lease_id: str, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """As `AsyncVerbs.list_files`."""
        return self._sender.send(messages.list_files(lease_id, path, recursive))

    def get_archive(self, lease_id: str, path: str = ".") -> bytes:
        """As `AsyncVerbs.get_archive`."""
        return self._sender.send(messages.get_archive(lease_id, path))

    def get_archive_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """As `AsyncVerbs.get_archive_to`."""
        return self._sender.save(messages.get_archive(lease_id, path), Path(target))

    def stream_archive(self, lease_id: str, path: str = ".") -> Iterator[bytes]:
        """As `AsyncVerbs.stream_archive`."""
        return self._sender.stream(messages.get_archive(lease_id, path))

    def put_archive(self, lease_id: str, path: str, source: Source) -> None:
        """As `AsyncVerbs.put_archive`."""
        self._sender.send(messages.put_archive(lease_id, path), Upload(source))

    def pools(self) -> tuple[PoolInfo, ...]:
        """As `AsyncVerbs.pools`."""
        return self._sender.send(messages.pools())

    def pool(self, name: str) -> PoolInfo:
        """As `AsyncVerbs.pool`."""
        return self._sender.send(messages.pool(name))

    def healthz(self) -> Mapping[str, Any]:
        """As `AsyncVerbs.healthz`."""
        return self._sender.send(messages.healthz())

    def readyz(self, pool: str | None = None) -> Readiness:
        """As `AsyncVerbs.readyz`."""
        return self._sender.send(messages.readyz(pool))

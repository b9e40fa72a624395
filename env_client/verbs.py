"""The contract's verbs of leases, calls and files: a verb builds its message and sends it. What it means is said once, at the asynchronous one."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack

from env_client.batches import BatchProgress
from env_client.messages import verbs
from env_client.service_verbs import AsyncServiceVerbs, ServiceVerbs
from env_client.transport.progress import ExecProgress, OutputProgress
from env_client.transport.uploads import AsyncSource, Source, Upload
from env_client.values import (
    Acquired,
    AcquireOptions,
    Call,
    CallOptions,
    CallStatus,
    FileEntry,
    LeaseInfo,
    LeasePage,
    Output,
    Released,
    Renewed,
    Result,
)


class AsyncVerbs(AsyncServiceVerbs):
    """What can be asked of the service. Every verb raises a `SandboxError`: a `ServiceError` for an answer, a `TransportError` for none."""

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
        return await self._sender.send(verbs.acquire(pool, count, **options))

    async def exec(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """Run one tool call.

        Args:
            lease_id: in whose slot.
            tool: its name, such as `bash`, as the program knows it; what a model calls a tool goes into a batch, where an unknown one is a result.
            args: its arguments; what is wrong with them is the result's `invalid_args`, as they may be a model's.
            options: see `CallOptions`.

        Raises:
            LeaseNotFound, LeaseLost, SandboxLost: there is no such lease any longer.
            InvalidRequest: there is no such tool, or an option is wrong.
        """
        return await self._sender.send(verbs.exec_one(verbs.make_call(lease_id, tool, args, **options)))

    def exec_events(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> AsyncIterator[Output | Result]:
        """As `exec`, but the output as it comes, then the result. A cut connection is taken up again at the byte where it was cut.

        Breaking off does not end the call; `cancel` does.
        """
        return self._sender.follow(ExecProgress(verbs.make_call(lease_id, tool, args, **options)))

    async def exec_batch(self, calls: Iterable[Call]) -> tuple[Result, ...]:
        """Run many calls over many leases; results in the order of the calls. What is wrong with one call is that call's own result.

        Args:
            calls: 1 to 1,000; those of one lease run in the order given, different leases side by side.
        """
        return await self._sender.send(verbs.exec_batch(verbs.named(calls)))

    def exec_stream(self, calls: Iterable[Call]) -> AsyncIterator[tuple[int, Result]]:
        """As `exec_batch`, but each result as soon as it is there, with its place in the batch."""
        return self._sender.follow(BatchProgress(calls))

    async def release(self, lease_ids: Iterable[str] | None = None, *, run_id: str | None = None, reset_workspace: bool = True) -> Released:
        """Give slots back.

        Args:
            lease_ids: which; or
            run_id: all of a run's.
            reset_workspace: False keeps the files for the run's next acquire.
        """
        return await self._sender.send(verbs.release(lease_ids, run_id, reset_workspace))

    async def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> Renewed:
        """Have leases hold for `ttl_s` seconds from now (default 300); never shortens. Those that are over are in `lost`."""
        return await self._sender.send(verbs.renew(lease_ids, ttl_s))

    async def cancel(self, lease_id: str, call_id: str) -> Result:
        """End a call that runs; its result, which is `cancelled` unless it had ended by itself."""
        return await self._sender.send(verbs.cancel(lease_id, call_id))

    async def call_status(self, lease_id: str, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """Where a call is.

        Args:
            lease_id: in whose slot.
            call_id: which call.
            wait_s: how long to wait for its end, in seconds; default: do not.

        Raises:
            CallNotFound: the lease has no such call.
        """
        return await self._sender.send(verbs.call_status(lease_id, call_id, wait_s))

    def call_output(self, lease_id: str, call_id: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """The whole output of a call, piece by piece, from a byte on: also what was cut out of the middle of its result."""
        return self._sender.follow(OutputProgress(lease_id, call_id, offset))

    async def narrow(self, lease_id: str, *, allow_network: bool | None = None, cache: str | None = None) -> LeaseInfo:
        """Take rights away from a held slot for good: its processes end, its files stay.

        Args:
            lease_id: whose slot.
            allow_network: False takes the network.
            cache: `none` takes the cache.
        """
        return await self._sender.send(verbs.narrow(lease_id, allow_network, cache))

    async def lease_info(self, lease_id: str) -> LeaseInfo:
        """A lease as it is now."""
        return await self._sender.send(verbs.lease_info(lease_id))

    async def leases(self, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int | None = None, cursor: str | None = None) -> LeasePage:
        """A page of one's leases, all or those of a run or trajectory."""
        return await self._sender.send(verbs.leases(run_id, trajectory_id, limit, cursor))

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
        return await self._sender.send(verbs.get_file(lease_id, path))

    async def get_file_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a file of the slot into a local one, which is replaced once all is there. Returns its size in bytes."""
        return await self._sender.save(verbs.get_file(lease_id, path), Path(target))

    def stream_file(self, lease_id: str, path: str) -> AsyncIterator[bytes]:
        """A file of the slot, piece by piece."""
        return self._sender.stream(verbs.get_file(lease_id, path))

    async def put_file(self, lease_id: str, path: str, source: AsyncSource, *, mode: int | None = None) -> None:
        """Write a file of the slot, atomically.

        Args:
            lease_id: in whose slot.
            path: where.
            source: bytes, a local path, an open binary file, or chunks. Only what can be read twice is sent again after a cut connection.
            mode: its permissions, such as 0o755.
        """
        await self._sender.send(verbs.put_file(lease_id, path, mode), Upload(source))

    async def list_files(self, lease_id: str, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """The entries of a folder of the slot."""
        return await self._sender.send(verbs.list_files(lease_id, path, recursive))

    async def get_archive(self, lease_id: str, path: str = ".") -> bytes:
        """A tree of the slot as a gzipped tar."""
        return await self._sender.send(verbs.get_archive(lease_id, path))

    async def get_archive_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a tree of the slot into a local `.tar.gz`, which is replaced once all is there. Returns its size in bytes."""
        return await self._sender.save(verbs.get_archive(lease_id, path), Path(target))

    def stream_archive(self, lease_id: str, path: str = ".") -> AsyncIterator[bytes]:
        """A tree of the slot as a gzipped tar, piece by piece."""
        return self._sender.stream(verbs.get_archive(lease_id, path))

    async def put_archive(self, lease_id: str, path: str, source: AsyncSource) -> None:
        """Unpack a gzipped tar under a folder of the slot; `source` as in `put_file`."""
        await self._sender.send(verbs.put_archive(lease_id, path), Upload(source))


class Verbs(ServiceVerbs):
    """As `AsyncVerbs`, blocking, for any number of threads."""

    def acquire(self, pool: str | None = None, count: int = 1, **options: Unpack[AcquireOptions]) -> Acquired:
        """As `AsyncVerbs.acquire`."""
        return self._sender.send(verbs.acquire(pool, count, **options))

    def exec(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """As `AsyncVerbs.exec`."""
        return self._sender.send(verbs.exec_one(verbs.make_call(lease_id, tool, args, **options)))

    def exec_events(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Iterator[Output | Result]:
        """As `AsyncVerbs.exec_events`."""
        return self._sender.follow(ExecProgress(verbs.make_call(lease_id, tool, args, **options)))

    def exec_batch(self, calls: Iterable[Call]) -> tuple[Result, ...]:
        """As `AsyncVerbs.exec_batch`."""
        return self._sender.send(verbs.exec_batch(verbs.named(calls)))

    def exec_stream(self, calls: Iterable[Call]) -> Iterator[tuple[int, Result]]:
        """As `AsyncVerbs.exec_stream`."""
        return self._sender.follow(BatchProgress(calls))

    def release(self, lease_ids: Iterable[str] | None = None, *, run_id: str | None = None, reset_workspace: bool = True) -> Released:
        """As `AsyncVerbs.release`."""
        return self._sender.send(verbs.release(lease_ids, run_id, reset_workspace))

    def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> Renewed:
        """As `AsyncVerbs.renew`."""
        return self._sender.send(verbs.renew(lease_ids, ttl_s))

    def cancel(self, lease_id: str, call_id: str) -> Result:
        """As `AsyncVerbs.cancel`."""
        return self._sender.send(verbs.cancel(lease_id, call_id))

    def call_status(self, lease_id: str, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """As `AsyncVerbs.call_status`."""
        return self._sender.send(verbs.call_status(lease_id, call_id, wait_s))

    def call_output(self, lease_id: str, call_id: str, *, offset: int = 0) -> Iterator[bytes]:
        """As `AsyncVerbs.call_output`."""
        return self._sender.follow(OutputProgress(lease_id, call_id, offset))

    def narrow(self, lease_id: str, *, allow_network: bool | None = None, cache: str | None = None) -> LeaseInfo:
        """As `AsyncVerbs.narrow`."""
        return self._sender.send(verbs.narrow(lease_id, allow_network, cache))

    def lease_info(self, lease_id: str) -> LeaseInfo:
        """As `AsyncVerbs.lease_info`."""
        return self._sender.send(verbs.lease_info(lease_id))

    def leases(self, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int | None = None, cursor: str | None = None) -> LeasePage:
        """As `AsyncVerbs.leases`."""
        return self._sender.send(verbs.leases(run_id, trajectory_id, limit, cursor))

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
        return self._sender.send(verbs.get_file(lease_id, path))

    def get_file_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """As `AsyncVerbs.get_file_to`."""
        return self._sender.save(verbs.get_file(lease_id, path), Path(target))

    def stream_file(self, lease_id: str, path: str) -> Iterator[bytes]:
        """As `AsyncVerbs.stream_file`."""
        return self._sender.stream(verbs.get_file(lease_id, path))

    def put_file(self, lease_id: str, path: str, source: Source, *, mode: int | None = None) -> None:
        """As `AsyncVerbs.put_file`."""
        self._sender.send(verbs.put_file(lease_id, path, mode), Upload(source))

    def list_files(self, lease_id: str, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """As `AsyncVerbs.list_files`."""
        return self._sender.send(verbs.list_files(lease_id, path, recursive))

    def get_archive(self, lease_id: str, path: str = ".") -> bytes:
        """As `AsyncVerbs.get_archive`."""
        return self._sender.send(verbs.get_archive(lease_id, path))

    def get_archive_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """As `AsyncVerbs.get_archive_to`."""
        return self._sender.save(verbs.get_archive(lease_id, path), Path(target))

    def stream_archive(self, lease_id: str, path: str = ".") -> Iterator[bytes]:
        """As `AsyncVerbs.stream_archive`."""
        return self._sender.stream(verbs.get_archive(lease_id, path))

    def put_archive(self, lease_id: str, path: str, source: Source) -> None:
        """As `AsyncVerbs.put_archive`."""
        self._sender.send(verbs.put_archive(lease_id, path), Upload(source))

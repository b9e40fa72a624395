"""The client methods for leases, calls and files. Each one builds a message and sends it; the asynchronous method has the complete description."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Unpack

from env_client.messages import calls as call_messages
from env_client.messages import files as file_messages
from env_client.messages import leases as lease_messages
from env_client.messages.ports import PortAddress, port_address
from env_client.messages.programs import Program, ProgramResult
from env_client.operations.service_operations import AsyncServiceOperations, ServiceOperations
from env_client.transport.batch_stream import BatchStream
from env_client.transport.program_stream import ProgramStream
from env_client.transport.resumable_streams import CallEventStream, CallOutputStream
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


class AsyncOperations(AsyncServiceOperations):
    """All requests of the contract. Every method raises a `SandboxError`: a `ServiceError` if the service refused, a `TransportError` if no response came."""

    async def acquire(self, pool: str | None = None, count: int = 1, **options: Unpack[AcquireOptions]) -> Acquired:
        """Acquire slots: all `count` of them or none. Nothing renews these leases; the methods `lease` and `gang` of the client do.

        Args:
            pool: the pool; default the service's default pool.
            count: how many slots.
            options: see `AcquireOptions`.

        Raises:
            NoCapacity: no slots became free within `wait_s`.
            InvalidRequest: the pool can never hold that many slots, or an option is wrong.
            PoolNotFound: there is no such pool.
            Draining: the pool or the service gives no new leases.
            BackendUnavailable: the backend of the pool cannot make sandboxes.
            QuotaExceeded: a limit of the tenant is reached.
        """
        return await self._sender.send(lease_messages.acquire_message(pool, count, **options))

    async def exec(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """Run one tool call and return its result.

        Args:
            lease_id: the lease in whose slot the call runs.
            tool: the name of the tool, such as `bash`, chosen by the program. If a model chooses it, use a batch: there, an unknown tool is a result.
            args: the arguments of the tool. They may come from a model: wrong ones are a result with the reason `invalid_args`.
            options: see `CallOptions`.

        Raises:
            LeaseNotFound: there is no such lease.
            LeaseLost: the lease has ended.
            SandboxLost: the sandbox of the lease is lost.
            InvalidRequest: there is no such tool, or an option is wrong.
        """
        return await self._sender.send(call_messages.exec_message(call_messages.make_call(lease_id, tool, args, **options)))

    def exec_events(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> AsyncIterator[Output | Result]:
        """Run one tool call; yield its output as it is written, then its result.

        After a lost connection, the stream is resumed at the byte at which it was cut. Leaving the loop does not end the call; `cancel` does.
        Arguments and errors are those of `exec`.
        """
        return self._sender.follow(CallEventStream(call_messages.make_call(lease_id, tool, args, **options)))

    async def exec_batch(self, calls: Iterable[Call]) -> tuple[Result, ...]:
        """Run many calls over many leases; return the results in the order of the calls. A mistake in one call is reported in its result.

        Args:
            calls: 1 to 1,000 calls. Calls of one lease run in the given order; calls of different leases run concurrently.
        """
        return await self._sender.send(call_messages.exec_batch_message(call_messages.assign_call_ids(calls)))

    def exec_stream(self, calls: Iterable[Call]) -> AsyncIterator[tuple[int, Result]]:
        """Run many calls as `exec_batch` does; yield each result as soon as its call ends, with the index of the call in the batch."""
        return self._sender.follow(BatchStream(calls))

    def run_many(
        self,
        programs: Iterable[Program | Mapping[str, Any]],
        *,
        pool: str | None = None,
        run_id: str | None = None,
        request_key: str | None = None,
        max_parallel: int | None = None,
    ) -> AsyncIterator[ProgramResult]:
        """Run many programs, each in a fresh slot of its own; yield each result as soon as the program has ended, with its place among the programs.

        After a lost connection or a restart of the service, the results that are there are not computed again, and no program runs twice. Leaving the
        loop lets no further program begin.

        Args:
            programs: the programs, or items of the HTTP contract. The service takes up to `limits.run_batch_items`, 10,000 by default.
            pool: the pool; default the service's default pool.
            run_id: the run that owns the leases; releasing the run ends all programs.
            request_key: names the request, so that another process can ask for the same results for an hour; default a new one.
            max_parallel: how many programs may run at once; default half of the pool's slots.

        Raises:
            InvalidRequest: a program is wrong; `extra` has its `index`. Nothing has run.
            CallConflict: `request_key` was used with other programs.
            LeaseLost: the results of `request_key` are not kept any more.
        """
        header = {"pool": pool, "run_id": run_id, "request_key": request_key, "max_parallel": max_parallel}
        return self._sender.follow(ProgramStream(programs, header))

    async def release(
        self, lease_ids: Iterable[str] | None = None, *, run_id: str | None = None, request_key: str | None = None, reset_workspace: bool = True
    ) -> Released:
        """Release leases: the given ones, all of a run, or those of one acquire.

        Args:
            lease_ids: the leases; or
            run_id: the run; or
            request_key: the key of the acquire. If it still waits, is being granted, or arrives later, it raises `LeaseLost` and leases nothing.
            reset_workspace: False keeps the files for the next acquire of the run.
        """
        return await self._sender.send(lease_messages.release_message(lease_ids, run_id, reset_workspace, request_key))

    async def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> Renewed:
        """Renew leases. A renewal never shortens a lease.

        Args:
            lease_ids: the leases.
            ttl_s: how long they last from now on, in seconds; default 300.

        Returns:
            The renewed leases; leases that have ended are in `lost`.
        """
        return await self._sender.send(lease_messages.renew_message(lease_ids, ttl_s))

    async def cancel(self, lease_id: str, call_id: str) -> Result:
        """End a running call; return its result, whose reason is `cancelled` unless the call had ended by itself."""
        return await self._sender.send(call_messages.cancel_message(lease_id, call_id))

    async def call_status(self, lease_id: str, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """Return the state of a call.

        Args:
            lease_id: the lease of the call.
            call_id: the call.
            wait_s: how long to wait for the end of the call, in seconds; default not at all.

        Raises:
            CallNotFound: the lease has no such call.
        """
        return await self._sender.send(call_messages.call_status_message(lease_id, call_id, wait_s))

    def call_output(self, lease_id: str, call_id: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the complete output of a call from a byte offset on, including what was cut out of the middle of its result."""
        return self._sender.follow(CallOutputStream(lease_id, call_id, offset))

    async def narrow(self, lease_id: str, *, allow_network: bool | None = None, cache: str | None = None, read_only: Sequence[str] | None = None) -> LeaseInfo:
        """Take rights away from a held slot for good. The processes of the slot end; its files stay.

        Args:
            lease_id: the lease of the slot.
            allow_network: False takes the network away.
            cache: `none` takes the cache away.
            read_only: names of entries at the top of the workspace that the slot can no longer change. It can still read and run them.

        Raises:
            InvalidRequest: an entry does not exist, or cannot be made read-only.
            NotImplementedYet: the isolation mode of the slot cannot take this right away; see `capabilities` of its pool.
        """
        return await self._sender.send(lease_messages.narrow_message(lease_id, allow_network, cache, read_only))

    def port(self, lease_id: str, port: int) -> PortAddress:
        """Return the address of a program that listens on a port of the slot. Nothing is sent: whether it can be reached, a request to it will tell.

        Args:
            lease_id: the lease of the slot, which needs a network of its own: acquire it with `allow_network=False`.
            port: the TCP port that the program listens on.

        Raises:
            InvalidRequest: the port is not one.
        """
        endpoint = self._sender.core.endpoint
        return port_address(endpoint.url, endpoint.token, lease_id, port)

    async def lease_info(self, lease_id: str) -> LeaseInfo:
        """Return the present state of a lease."""
        return await self._sender.send(lease_messages.get_lease_message(lease_id))

    async def leases(self, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int | None = None, cursor: str | None = None) -> LeasePage:
        """Return one page of the tenant's leases: all of them, or those of a run or a trajectory."""
        return await self._sender.send(lease_messages.list_leases_message(run_id, trajectory_id, limit, cursor))

    async def iter_leases(self, *, run_id: str | None = None, trajectory_id: str | None = None) -> AsyncIterator[LeaseInfo]:
        """Yield the leases of all pages of `leases`."""
        page = await self.leases(run_id=run_id, trajectory_id=trajectory_id)
        while True:
            for info in page.leases:
                yield info
            if page.next_cursor is None:
                return
            page = await self.leases(run_id=run_id, trajectory_id=trajectory_id, cursor=page.next_cursor)

    async def get_file(self, lease_id: str, path: str) -> bytes:
        """Read a file of the slot.

        Args:
            lease_id: the lease of the slot.
            path: relative to the workspace, or absolute inside the workspace or the slot's `/tmp`.

        Raises:
            FileNotFound: there is no such file.
            FileError: the path is a directory, a device or the like.
            InvalidRequest: the path leads out of the workspace and `/tmp`.
        """
        return await self._sender.send(file_messages.get_file_message(lease_id, path))

    async def get_file_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a file of the slot into a local file, which is replaced once the download is complete. Returns the size in bytes."""
        return await self._sender.save(file_messages.get_file_message(lease_id, path), Path(target))

    def stream_file(self, lease_id: str, path: str) -> AsyncIterator[bytes]:
        """Yield the content of a file of the slot in chunks."""
        return self._sender.stream(file_messages.get_file_message(lease_id, path))

    async def put_file(self, lease_id: str, path: str, source: AsyncSource, *, mode: int | None = None) -> None:
        """Write a file of the slot atomically.

        Args:
            lease_id: the lease of the slot.
            path: as in `get_file`.
            source: bytes, a local path, an open binary file, or chunks. After a lost connection, only a source that can be read again is sent again.
            mode: the permissions of the file, such as 0o755.
        """
        await self._sender.send(file_messages.put_file_message(lease_id, path, mode), Upload(source))

    async def list_files(self, lease_id: str, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """List a folder of the slot."""
        return await self._sender.send(file_messages.list_files_message(lease_id, path, recursive))

    async def get_recording(self, lease_id: str, name: str) -> bytes:
        """Read the recording of a terminal, an asciicast of version 2, as far as it exists now.

        Args:
            lease_id: the lease of the slot.
            name: `metadata["recording"]` of a result of the tool `tmux`.

        Raises:
            FileNotFound: the lease has no such recording.
        """
        return await self._sender.send(file_messages.get_recording_message(lease_id, name))

    async def get_recording_to(self, lease_id: str, name: str, target: str | os.PathLike[str]) -> int:
        """Stream the recording of a terminal into a local file, which is replaced once the download is complete. Returns the size in bytes."""
        return await self._sender.save(file_messages.get_recording_message(lease_id, name), Path(target))

    async def get_archive(self, lease_id: str, path: str = ".") -> bytes:
        """Read a folder of the slot as a gzipped tar."""
        return await self._sender.send(file_messages.get_archive_message(lease_id, path))

    async def get_archive_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a folder of the slot into a local `.tar.gz`, which is replaced once the download is complete. Returns the size in bytes."""
        return await self._sender.save(file_messages.get_archive_message(lease_id, path), Path(target))

    def stream_archive(self, lease_id: str, path: str = ".") -> AsyncIterator[bytes]:
        """Yield a folder of the slot as a gzipped tar in chunks."""
        return self._sender.stream(file_messages.get_archive_message(lease_id, path))

    async def put_archive(self, lease_id: str, path: str, source: AsyncSource) -> None:
        """Unpack a gzipped tar into a folder of the slot; `source` is as in `put_file`."""
        await self._sender.send(file_messages.put_archive_message(lease_id, path), Upload(source))


class Operations(ServiceOperations):
    """The blocking counterpart of `AsyncOperations`, for use by any number of threads."""

    def acquire(self, pool: str | None = None, count: int = 1, **options: Unpack[AcquireOptions]) -> Acquired:
        """See `AsyncOperations.acquire`."""
        return self._sender.send(lease_messages.acquire_message(pool, count, **options))

    def exec(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """See `AsyncOperations.exec`."""
        return self._sender.send(call_messages.exec_message(call_messages.make_call(lease_id, tool, args, **options)))

    def exec_events(self, lease_id: str, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Iterator[Output | Result]:
        """See `AsyncOperations.exec_events`."""
        return self._sender.follow(CallEventStream(call_messages.make_call(lease_id, tool, args, **options)))

    def exec_batch(self, calls: Iterable[Call]) -> tuple[Result, ...]:
        """See `AsyncOperations.exec_batch`."""
        return self._sender.send(call_messages.exec_batch_message(call_messages.assign_call_ids(calls)))

    def exec_stream(self, calls: Iterable[Call]) -> Iterator[tuple[int, Result]]:
        """See `AsyncOperations.exec_stream`."""
        return self._sender.follow(BatchStream(calls))

    def run_many(
        self,
        programs: Iterable[Program | Mapping[str, Any]],
        *,
        pool: str | None = None,
        run_id: str | None = None,
        request_key: str | None = None,
        max_parallel: int | None = None,
    ) -> Iterator[ProgramResult]:
        """See `AsyncOperations.run_many`."""
        header = {"pool": pool, "run_id": run_id, "request_key": request_key, "max_parallel": max_parallel}
        return self._sender.follow(ProgramStream(programs, header))

    def release(
        self, lease_ids: Iterable[str] | None = None, *, run_id: str | None = None, request_key: str | None = None, reset_workspace: bool = True
    ) -> Released:
        """See `AsyncOperations.release`."""
        return self._sender.send(lease_messages.release_message(lease_ids, run_id, reset_workspace, request_key))

    def renew(self, lease_ids: Iterable[str], ttl_s: float | None = None) -> Renewed:
        """See `AsyncOperations.renew`."""
        return self._sender.send(lease_messages.renew_message(lease_ids, ttl_s))

    def cancel(self, lease_id: str, call_id: str) -> Result:
        """See `AsyncOperations.cancel`."""
        return self._sender.send(call_messages.cancel_message(lease_id, call_id))

    def call_status(self, lease_id: str, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """See `AsyncOperations.call_status`."""
        return self._sender.send(call_messages.call_status_message(lease_id, call_id, wait_s))

    def call_output(self, lease_id: str, call_id: str, *, offset: int = 0) -> Iterator[bytes]:
        """See `AsyncOperations.call_output`."""
        return self._sender.follow(CallOutputStream(lease_id, call_id, offset))

    def narrow(self, lease_id: str, *, allow_network: bool | None = None, cache: str | None = None, read_only: Sequence[str] | None = None) -> LeaseInfo:
        """See `AsyncOperations.narrow`."""
        return self._sender.send(lease_messages.narrow_message(lease_id, allow_network, cache, read_only))

    def port(self, lease_id: str, port: int) -> PortAddress:
        """See `AsyncOperations.port`."""
        endpoint = self._sender.core.endpoint
        return port_address(endpoint.url, endpoint.token, lease_id, port)

    def lease_info(self, lease_id: str) -> LeaseInfo:
        """See `AsyncOperations.lease_info`."""
        return self._sender.send(lease_messages.get_lease_message(lease_id))

    def leases(self, *, run_id: str | None = None, trajectory_id: str | None = None, limit: int | None = None, cursor: str | None = None) -> LeasePage:
        """See `AsyncOperations.leases`."""
        return self._sender.send(lease_messages.list_leases_message(run_id, trajectory_id, limit, cursor))

    def iter_leases(self, *, run_id: str | None = None, trajectory_id: str | None = None) -> Iterator[LeaseInfo]:
        """See `AsyncOperations.iter_leases`."""
        page = self.leases(run_id=run_id, trajectory_id=trajectory_id)
        while True:
            yield from page.leases
            if page.next_cursor is None:
                return
            page = self.leases(run_id=run_id, trajectory_id=trajectory_id, cursor=page.next_cursor)

    def get_file(self, lease_id: str, path: str) -> bytes:
        """See `AsyncOperations.get_file`."""
        return self._sender.send(file_messages.get_file_message(lease_id, path))

    def get_file_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """See `AsyncOperations.get_file_to`."""
        return self._sender.save(file_messages.get_file_message(lease_id, path), Path(target))

    def stream_file(self, lease_id: str, path: str) -> Iterator[bytes]:
        """See `AsyncOperations.stream_file`."""
        return self._sender.stream(file_messages.get_file_message(lease_id, path))

    def put_file(self, lease_id: str, path: str, source: Source, *, mode: int | None = None) -> None:
        """See `AsyncOperations.put_file`."""
        self._sender.send(file_messages.put_file_message(lease_id, path, mode), Upload(source))

    def list_files(self, lease_id: str, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """See `AsyncOperations.list_files`."""
        return self._sender.send(file_messages.list_files_message(lease_id, path, recursive))

    def get_recording(self, lease_id: str, name: str) -> bytes:
        """See `AsyncOperations.get_recording`."""
        return self._sender.send(file_messages.get_recording_message(lease_id, name))

    def get_recording_to(self, lease_id: str, name: str, target: str | os.PathLike[str]) -> int:
        """See `AsyncOperations.get_recording_to`."""
        return self._sender.save(file_messages.get_recording_message(lease_id, name), Path(target))

    def get_archive(self, lease_id: str, path: str = ".") -> bytes:
        """See `AsyncOperations.get_archive`."""
        return self._sender.send(file_messages.get_archive_message(lease_id, path))

    def get_archive_to(self, lease_id: str, path: str, target: str | os.PathLike[str]) -> int:
        """See `AsyncOperations.get_archive_to`."""
        return self._sender.save(file_messages.get_archive_message(lease_id, path), Path(target))

    def stream_archive(self, lease_id: str, path: str = ".") -> Iterator[bytes]:
        """See `AsyncOperations.stream_archive`."""
        return self._sender.stream(file_messages.get_archive_message(lease_id, path))

    def put_archive(self, lease_id: str, path: str, source: Source) -> None:
        """See `AsyncOperations.put_archive`."""
        self._sender.send(file_messages.put_archive_message(lease_id, path), Upload(source))

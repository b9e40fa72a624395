"""Leases as objects: the operations of the client for one lease. A lost lease raises an error at its next use, and sets `lost`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

from env_client.errors import LeaseLost, LeaseNotFound, SandboxError, ServiceError, service_error
from env_client.messages.calls import make_call
from env_client.messages.ports import PortAddress
from env_client.operations.lease_operations import AsyncOperations, Operations
from env_client.transport.uploads import AsyncSource, Source
from env_client.type_checks import check_type
from env_client.values import Call, CallOptions, CallStatus, FileEntry, LeaseInfo, Output, Released, Renewed, Result

#: The name of the recording of a lease's terminal.
RECORDING = "terminal.cast"


class BaseLease:
    """The state that `Lease` and `AsyncLease` share.

    Args:
        info: the lease as the service described it.
    """

    def __init__(self, info: LeaseInfo) -> None:
        #: The lease as the service last described it.
        self.info = info
        #: The error that says how the lease was lost; None as long as the client knows of no loss.
        self.lost: ServiceError | None = None
        #: The error of the last renewal; None if it succeeded. The client retries a failed renewal by itself.
        self.renewal_error: SandboxError | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.lease_id} {'lost' if self.lost else 'held'}>"

    @property
    def lease_id(self) -> str:
        """The id of the lease."""
        return self.info.lease_id

    def call(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Call:
        """Create a call in the slot of this lease, for a batch. `tool` and `args` may come from a model.

        Raises:
            InvalidRequest: `tool` is not text, or an option has the wrong type.
        """
        return make_call(self.lease_id, tool, args, **options)

    def record_renewal(self, info: LeaseInfo) -> None:
        """Take note that the service renewed the lease."""
        self.info, self.renewal_error = info, None

    def record_loss(self, error: ServiceError) -> None:
        """Take note that the lease has ended."""
        self.lost = self.lost or error

    def record_renewal_error(self, error: SandboxError) -> None:
        """Take note that a renewal failed. The heartbeat tries again."""
        self.renewal_error = error

    @contextmanager
    def _checked_lease_id(self) -> Iterator[str]:
        """Give the lease id to a block that uses the lease. The block is refused if the lease is lost; an error in it that says so marks the lease as lost.

        Raises:
            ServiceError: the lease is lost.
        """
        if self.lost is not None:
            raise service_error(self.lost.code, self.lost.detail, status=self.lost.status, request_id=self.lost.request_id) from self.lost
        try:
            yield self.lease_id
        except (LeaseLost, LeaseNotFound) as error:
            self.record_loss(error)
            raise

    def _apply_renewal(self, renewed: Renewed) -> LeaseInfo:
        """Update this lease from the response to a renewal.

        Raises:
            ServiceError: the lease is lost.
        """
        if self.lease_id in renewed.lost:
            raise renewed.lost[self.lease_id]
        for info in renewed.leases:
            self.record_renewal(info)
        return self.info


def send_keys_args(keys: str | Sequence[str], block: bool, args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `send_keys` of the tool `tmux` after checking the types of the keys.

    Args:
        keys: one key or text, or several.
        block: whether to wait until the program has settled.
        args: further arguments of the tool.

    Raises:
        InvalidRequest: the keys have the wrong type.
    """
    check_type("keys", keys, str, Sequence)
    listed = keys if isinstance(keys, str) else list(keys)
    for key in listed:
        check_type("keys", key, str)
    return {"action": "send_keys", "keys": listed, "block": block, **args}


def bash_args(command: str, cwd: str | None, env: Mapping[str, str] | None, stdin: str | None) -> dict[str, Any]:
    """Return the arguments of the tool `bash` after checking their types.

    Args:
        command: the shell command.
        cwd: the working folder; None for the workspace.
        env: variables for the command.
        stdin: the standard input of the command.

    Raises:
        InvalidRequest: an argument has the wrong type.
    """
    check_type("command", command, str)
    check_type("cwd", cwd, str, type(None))
    check_type("stdin", stdin, str, type(None))
    check_type("env", env, Mapping, type(None))
    for name, value in (env or {}).items():
        check_type("env", name, str)
        check_type(f"env.{name}", value, str)
    args = {"command": command, "cwd": cwd, "env": env, "stdin": stdin}
    return {name: value for name, value in args.items() if value is not None}


def stateful_args(command: str, session: str | None) -> dict[str, Any]:
    """Return the arguments of the tool `bash_stateful` after checking their types.

    Args:
        command: the shell command.
        session: the name of the session; None for the default one.

    Raises:
        InvalidRequest: an argument has the wrong type.
    """
    check_type("command", command, str)
    check_type("session", session, str, type(None))
    return {"command": command} if session is None else {"command": command, "session": session}


class AsyncLease(BaseLease):
    """A lease of an `AsyncSandboxClient`.

    Its methods are those of the client without the lease id. They raise `LeaseLost`, `SandboxLost` or `LeaseNotFound` once the lease is lost.

    Args:
        operations: the client.
        info: the lease as the service described it.
    """

    def __init__(self, operations: AsyncOperations, info: LeaseInfo) -> None:
        super().__init__(info)
        self._operations = operations

    async def exec(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """Run one tool call and return its result."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.exec(lease_id, tool, args, **options)

    async def bash(
        self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None, stdin: str | None = None, **options: Unpack[CallOptions]
    ) -> Result:
        """Run a shell command and return its result.

        Args:
            command: the command, as `bash -c` takes it.
            cwd: the working folder; default the workspace.
            env: variables for the command.
            stdin: the standard input of the command; default empty.
            options: see `CallOptions`.

        Raises:
            InvalidRequest: an argument or an option has the wrong type or an invalid value, such as a `timeout_s` above the maximum of the pool.
        """
        return await self.exec("bash", bash_args(command, cwd, env, stdin), **options)

    async def send_keys(
        self, keys: str | Sequence[str], *, block: bool = False, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]
    ) -> Result:
        """Type into the terminal of the lease, which the first use starts. The output of the result is the screen.

        Args:
            keys: one or several of: names of keys such as `Enter`, `C-c`, `Up`, or text, as `tmux send-keys` takes them.
            block: wait until the program has settled, which `metadata["settled"]` says.
            args: further arguments of the tool `tmux`, such as `max_wait_s` or `capture_incremental`.
            options: see `CallOptions`.
        """
        return await self.exec("tmux", send_keys_args(keys, block, args or {}), **options)

    async def capture_screen(self, *, entire: bool = False, **options: Unpack[CallOptions]) -> Result:
        """Return the screen of the terminal as the output of a result; with `entire`, also what has scrolled out of it."""
        return await self.exec("tmux", {"action": "capture", "capture_entire": entire}, **options)

    async def get_recording(self, name: str = RECORDING) -> bytes:
        """Read the recording of the terminal, an asciicast of version 2, as far as it exists now."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.get_recording(lease_id, name)

    async def get_recording_to(self, target: str | os.PathLike[str], name: str = RECORDING) -> int:
        """Stream the recording of the terminal into a local file. Returns the size in bytes."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.get_recording_to(lease_id, name, target)

    async def bash_stateful(self, command: str, *, session: str | None = None, **options: Unpack[CallOptions]) -> Result:
        """Run a command in a shell that stays, and return its result. `metadata["session"]` says whether the shell was `kept` or `restarted`.

        Args:
            command: the command.
            session: the name of the shell; default the one shell that the lease has without a name. Calls of one session run one after another.
            options: see `CallOptions`.

        Raises:
            InvalidRequest: an argument or an option has the wrong type or an invalid value.
        """
        return await self.exec("bash_stateful", stateful_args(command, session), **options)

    async def exec_events(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> AsyncIterator[Output | Result]:
        """Run one tool call; yield its output as it is written, then its result."""
        with self._checked_lease_id() as lease_id:
            async for item in self._operations.exec_events(lease_id, tool, args, **options):
                yield item

    async def call_status(self, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """Return the state of a call; with `wait_s`, wait up to that many seconds for its end."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.call_status(lease_id, call_id, wait_s=wait_s)

    async def call_output(self, call_id: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """Yield the complete output of a call from a byte offset on."""
        with self._checked_lease_id() as lease_id:
            async for chunk in self._operations.call_output(lease_id, call_id, offset=offset):
                yield chunk

    async def cancel(self, call_id: str) -> Result:
        """End a running call and return its result."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.cancel(lease_id, call_id)

    async def renew(self, ttl_s: float | None = None) -> LeaseInfo:
        """Make the lease last for `ttl_s` seconds from now on. The client does this by itself for leases that it holds."""
        with self._checked_lease_id() as lease_id:
            return self._apply_renewal(await self._operations.renew([lease_id], ttl_s))

    async def narrow(self, *, allow_network: bool | None = None, cache: str | None = None, read_only: Sequence[str] | None = None) -> LeaseInfo:
        """Take the network (`allow_network=False`) or the cache (`cache="none"`) away, or make entries of the workspace read-only, for good.

        The processes of the slot end; its files stay. See `AsyncOperations.narrow`.
        """
        with self._checked_lease_id() as lease_id:
            self.record_renewal(await self._operations.narrow(lease_id, allow_network=allow_network, cache=cache, read_only=read_only))
            return self.info

    def port(self, port: int) -> PortAddress:
        """Return the address of a program that listens on a port of the slot, see `AsyncOperations.port`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.port(lease_id, port)

    async def release(self, *, reset_workspace: bool = True) -> Released:
        """Release the lease before its block ends."""
        return await self._operations.release([self.lease_id], reset_workspace=reset_workspace)

    async def get_file(self, path: str) -> bytes:
        """Read a file of the slot."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.get_file(lease_id, path)

    async def get_file_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a file of the slot into a local file. Returns the size in bytes."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.get_file_to(lease_id, path, target)

    async def stream_file(self, path: str) -> AsyncIterator[bytes]:
        """Yield the content of a file of the slot in chunks."""
        with self._checked_lease_id() as lease_id:
            async for chunk in self._operations.stream_file(lease_id, path):
                yield chunk

    async def put_file(self, path: str, source: AsyncSource, *, mode: int | None = None) -> None:
        """Write a file of the slot atomically."""
        with self._checked_lease_id() as lease_id:
            await self._operations.put_file(lease_id, path, source, mode=mode)

    async def list_files(self, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """List a folder of the slot."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.list_files(lease_id, path, recursive=recursive)

    async def get_archive(self, path: str = ".") -> bytes:
        """Read a folder of the slot as a gzipped tar."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.get_archive(lease_id, path)

    async def get_archive_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a folder of the slot into a local `.tar.gz`. Returns the size in bytes."""
        with self._checked_lease_id() as lease_id:
            return await self._operations.get_archive_to(lease_id, path, target)

    async def stream_archive(self, path: str = ".") -> AsyncIterator[bytes]:
        """Yield a folder of the slot as a gzipped tar in chunks."""
        with self._checked_lease_id() as lease_id:
            async for chunk in self._operations.stream_archive(lease_id, path):
                yield chunk

    async def put_archive(self, path: str, source: AsyncSource) -> None:
        """Unpack a gzipped tar into a folder of the slot."""
        with self._checked_lease_id() as lease_id:
            await self._operations.put_archive(lease_id, path, source)


class Lease(BaseLease):
    """The blocking counterpart of `AsyncLease`, for a `SandboxClient`."""

    def __init__(self, operations: Operations, info: LeaseInfo) -> None:
        super().__init__(info)
        self._operations = operations

    def exec(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """See `AsyncLease.exec`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.exec(lease_id, tool, args, **options)

    def bash(
        self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None, stdin: str | None = None, **options: Unpack[CallOptions]
    ) -> Result:
        """See `AsyncLease.bash`."""
        return self.exec("bash", bash_args(command, cwd, env, stdin), **options)

    def send_keys(self, keys: str | Sequence[str], *, block: bool = False, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """See `AsyncLease.send_keys`."""
        return self.exec("tmux", send_keys_args(keys, block, args or {}), **options)

    def capture_screen(self, *, entire: bool = False, **options: Unpack[CallOptions]) -> Result:
        """See `AsyncLease.capture_screen`."""
        return self.exec("tmux", {"action": "capture", "capture_entire": entire}, **options)

    def get_recording(self, name: str = RECORDING) -> bytes:
        """See `AsyncLease.get_recording`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.get_recording(lease_id, name)

    def get_recording_to(self, target: str | os.PathLike[str], name: str = RECORDING) -> int:
        """See `AsyncLease.get_recording_to`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.get_recording_to(lease_id, name, target)

    def bash_stateful(self, command: str, *, session: str | None = None, **options: Unpack[CallOptions]) -> Result:
        """See `AsyncLease.bash_stateful`."""
        return self.exec("bash_stateful", stateful_args(command, session), **options)

    def exec_events(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Iterator[Output | Result]:
        """See `AsyncLease.exec_events`."""
        with self._checked_lease_id() as lease_id:
            yield from self._operations.exec_events(lease_id, tool, args, **options)

    def call_status(self, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """See `AsyncLease.call_status`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.call_status(lease_id, call_id, wait_s=wait_s)

    def call_output(self, call_id: str, *, offset: int = 0) -> Iterator[bytes]:
        """See `AsyncLease.call_output`."""
        with self._checked_lease_id() as lease_id:
            yield from self._operations.call_output(lease_id, call_id, offset=offset)

    def cancel(self, call_id: str) -> Result:
        """See `AsyncLease.cancel`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.cancel(lease_id, call_id)

    def renew(self, ttl_s: float | None = None) -> LeaseInfo:
        """See `AsyncLease.renew`."""
        with self._checked_lease_id() as lease_id:
            return self._apply_renewal(self._operations.renew([lease_id], ttl_s))

    def narrow(self, *, allow_network: bool | None = None, cache: str | None = None, read_only: Sequence[str] | None = None) -> LeaseInfo:
        """See `AsyncLease.narrow`."""
        with self._checked_lease_id() as lease_id:
            self.record_renewal(self._operations.narrow(lease_id, allow_network=allow_network, cache=cache, read_only=read_only))
            return self.info

    def port(self, port: int) -> PortAddress:
        """See `AsyncLease.port`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.port(lease_id, port)

    def release(self, *, reset_workspace: bool = True) -> Released:
        """See `AsyncLease.release`."""
        return self._operations.release([self.lease_id], reset_workspace=reset_workspace)

    def get_file(self, path: str) -> bytes:
        """See `AsyncLease.get_file`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.get_file(lease_id, path)

    def get_file_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """See `AsyncLease.get_file_to`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.get_file_to(lease_id, path, target)

    def stream_file(self, path: str) -> Iterator[bytes]:
        """See `AsyncLease.stream_file`."""
        with self._checked_lease_id() as lease_id:
            yield from self._operations.stream_file(lease_id, path)

    def put_file(self, path: str, source: Source, *, mode: int | None = None) -> None:
        """See `AsyncLease.put_file`."""
        with self._checked_lease_id() as lease_id:
            self._operations.put_file(lease_id, path, source, mode=mode)

    def list_files(self, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """See `AsyncLease.list_files`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.list_files(lease_id, path, recursive=recursive)

    def get_archive(self, path: str = ".") -> bytes:
        """See `AsyncLease.get_archive`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.get_archive(lease_id, path)

    def get_archive_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """See `AsyncLease.get_archive_to`."""
        with self._checked_lease_id() as lease_id:
            return self._operations.get_archive_to(lease_id, path, target)

    def stream_archive(self, path: str = ".") -> Iterator[bytes]:
        """See `AsyncLease.stream_archive`."""
        with self._checked_lease_id() as lease_id:
            yield from self._operations.stream_archive(lease_id, path)

    def put_archive(self, path: str, source: Source) -> None:
        """See `AsyncLease.put_archive`."""
        with self._checked_lease_id() as lease_id:
            self._operations.put_archive(lease_id, path, source)

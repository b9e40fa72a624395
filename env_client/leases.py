"""A lease to work with: its verbs, renewed by a heartbeat. Losing it is surfaced at the next thing done with it, and in `lost`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Unpack

from env_client.checks import check_type
from env_client.errors import LeaseLost, LeaseNotFound, SandboxError, ServiceError, service_error
from env_client.messages import verbs as messages
from env_client.transport.uploads import AsyncSource, Source
from env_client.values import Call, CallOptions, CallStatus, FileEntry, LeaseInfo, Output, Released, Renewed, Result
from env_client.verbs import AsyncVerbs, Verbs


class HeldLease:
    """What both kinds of lease know.

    Args:
        info: as the service described it.
    """

    def __init__(self, info: LeaseInfo) -> None:
        #: As the service last described it.
        self.info = info
        #: How it was lost; None while it holds, as far as anybody told.
        self.lost: ServiceError | None = None
        #: Why the last renewal failed; None when it did not. It is tried again by itself.
        self.renewal_error: SandboxError | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.lease_id} {'lost' if self.lost else 'held'}>"

    @property
    def lease_id(self) -> str:
        """Its id."""
        return self.info.lease_id

    def call(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Call:
        """A call in this lease's slot, to be put in a batch. `tool` and `args` may be what a model has said.

        Raises:
            InvalidRequest: `tool` is no text, or an option not of its type.
        """
        return messages.make_call(self.lease_id, tool, args, **options)

    def renewed(self, info: LeaseInfo) -> None:
        """The heartbeat says: it holds on."""
        self.info, self.renewal_error = info, None

    def lose(self, error: ServiceError) -> None:
        """The heartbeat, or an answer, says: it is over."""
        self.lost = self.lost or error

    def unsure(self, error: SandboxError) -> None:
        """The heartbeat says: no answer."""
        self.renewal_error = error

    @contextmanager
    def _held(self) -> Iterator[str]:
        """Around everything done with the lease: refuses a lost one, and notes when an answer says that it is lost."""
        if self.lost is not None:
            raise service_error(self.lost.code, self.lost.detail, status=self.lost.status, request_id=self.lost.request_id) from self.lost
        try:
            yield self.lease_id
        except (LeaseLost, LeaseNotFound) as error:
            self.lose(error)
            raise

    def _settle(self, renewed: Renewed) -> LeaseInfo:
        """What an answer to a renewal says about this lease."""
        if self.lease_id in renewed.lost:
            raise renewed.lost[self.lease_id]
        for info in renewed.leases:
            self.renewed(info)
        return self.info


def bash_args(command: str, cwd: str | None, env: Mapping[str, str] | None, stdin: str | None) -> dict[str, Any]:
    """The arguments of the tool `bash`, as a program gives them in its own code.

    Raises:
        InvalidRequest: one of them is not of its type.
    """
    check_type("command", command, str)
    check_type("cwd", cwd, str, type(None))
    check_type("stdin", stdin, str, type(None))
    check_type("env", env, Mapping, type(None))
    for name, value in (env or {}).items():
        check_type("env", name, str)
        check_type(f"env.{name}", value, str)
    given = {"command": command, "cwd": cwd, "env": env, "stdin": stdin}
    return {name: value for name, value in given.items() if value is not None}


class AsyncLease(HeldLease):
    """A lease of an `AsyncSandboxClient`. Its verbs are the client's, and raise `LeaseLost` (or `SandboxLost`, `LeaseNotFound`) once it is lost.

    Args:
        verbs: the client.
        info: as the service described it.
    """

    def __init__(self, verbs: AsyncVerbs, info: LeaseInfo) -> None:
        super().__init__(info)
        self._verbs = verbs

    async def exec(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """Run one tool call."""
        with self._held() as lease_id:
            return await self._verbs.exec(lease_id, tool, args, **options)

    async def bash(
        self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None, stdin: str | None = None, **options: Unpack[CallOptions]
    ) -> Result:
        """Run a shell command.

        Raises:
            InvalidRequest: something beside the text of the command is wrong: a type, an option, a `timeout_s` over the pool's.
        """
        return await self.exec("bash", bash_args(command, cwd, env, stdin), **options)

    async def exec_events(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> AsyncIterator[Output | Result]:
        """Run one tool call: its output as it comes, then its result."""
        with self._held() as lease_id:
            async for item in self._verbs.exec_events(lease_id, tool, args, **options):
                yield item

    async def call_status(self, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """Where a call is; `wait_s` waits for its end."""
        with self._held() as lease_id:
            return await self._verbs.call_status(lease_id, call_id, wait_s=wait_s)

    async def call_output(self, call_id: str, *, offset: int = 0) -> AsyncIterator[bytes]:
        """The whole output of a call, piece by piece, from a byte on."""
        with self._held() as lease_id:
            async for chunk in self._verbs.call_output(lease_id, call_id, offset=offset):
                yield chunk

    async def cancel(self, call_id: str) -> Result:
        """End a call that runs."""
        with self._held() as lease_id:
            return await self._verbs.cancel(lease_id, call_id)

    async def renew(self, ttl_s: float | None = None) -> LeaseInfo:
        """Have it hold for `ttl_s` seconds from now. The heartbeat does this by itself."""
        with self._held() as lease_id:
            return self._settle(await self._verbs.renew([lease_id], ttl_s))

    async def narrow(self, *, allow_network: bool | None = None, cache: str | None = None) -> LeaseInfo:
        """Take the network (`allow_network=False`) or the cache (`cache="none"`) away for good: processes end, files stay."""
        with self._held() as lease_id:
            self.renewed(await self._verbs.narrow(lease_id, allow_network=allow_network, cache=cache))
            return self.info

    async def release(self, *, reset_workspace: bool = True) -> Released:
        """Give the slot back before the block ends."""
        return await self._verbs.release([self.lease_id], reset_workspace=reset_workspace)

    async def get_file(self, path: str) -> bytes:
        """A file of the slot."""
        with self._held() as lease_id:
            return await self._verbs.get_file(lease_id, path)

    async def get_file_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a file of the slot into a local one. Returns its size in bytes."""
        with self._held() as lease_id:
            return await self._verbs.get_file_to(lease_id, path, target)

    async def stream_file(self, path: str) -> AsyncIterator[bytes]:
        """A file of the slot, piece by piece."""
        with self._held() as lease_id:
            async for chunk in self._verbs.stream_file(lease_id, path):
                yield chunk

    async def put_file(self, path: str, source: AsyncSource, *, mode: int | None = None) -> None:
        """Write a file of the slot, atomically."""
        with self._held() as lease_id:
            await self._verbs.put_file(lease_id, path, source, mode=mode)

    async def list_files(self, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """The entries of a folder of the slot."""
        with self._held() as lease_id:
            return await self._verbs.list_files(lease_id, path, recursive=recursive)

    async def get_archive(self, path: str = ".") -> bytes:
        """A tree of the slot as a gzipped tar."""
        with self._held() as lease_id:
            return await self._verbs.get_archive(lease_id, path)

    async def get_archive_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """Stream a tree of the slot into a local `.tar.gz`. Returns its size in bytes."""
        with self._held() as lease_id:
            return await self._verbs.get_archive_to(lease_id, path, target)

    async def stream_archive(self, path: str = ".") -> AsyncIterator[bytes]:
        """A tree of the slot as a gzipped tar, piece by piece."""
        with self._held() as lease_id:
            async for chunk in self._verbs.stream_archive(lease_id, path):
                yield chunk

    async def put_archive(self, path: str, source: AsyncSource) -> None:
        """Unpack a gzipped tar under a folder of the slot."""
        with self._held() as lease_id:
            await self._verbs.put_archive(lease_id, path, source)


class Lease(HeldLease):
    """As `AsyncLease`, of a `SandboxClient`."""

    def __init__(self, verbs: Verbs, info: LeaseInfo) -> None:
        super().__init__(info)
        self._verbs = verbs

    def exec(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Result:
        """As `AsyncLease.exec`."""
        with self._held() as lease_id:
            return self._verbs.exec(lease_id, tool, args, **options)

    def bash(
        self, command: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None, stdin: str | None = None, **options: Unpack[CallOptions]
    ) -> Result:
        """As `AsyncLease.bash`."""
        return self.exec("bash", bash_args(command, cwd, env, stdin), **options)

    def exec_events(self, tool: str, args: Mapping[str, Any] | None = None, **options: Unpack[CallOptions]) -> Iterator[Output | Result]:
        """As `AsyncLease.exec_events`."""
        with self._held() as lease_id:
            yield from self._verbs.exec_events(lease_id, tool, args, **options)

    def call_status(self, call_id: str, *, wait_s: float | None = None) -> CallStatus:
        """As `AsyncLease.call_status`."""
        with self._held() as lease_id:
            return self._verbs.call_status(lease_id, call_id, wait_s=wait_s)

    def call_output(self, call_id: str, *, offset: int = 0) -> Iterator[bytes]:
        """As `AsyncLease.call_output`."""
        with self._held() as lease_id:
            yield from self._verbs.call_output(lease_id, call_id, offset=offset)

    def cancel(self, call_id: str) -> Result:
        """As `AsyncLease.cancel`."""
        with self._held() as lease_id:
            return self._verbs.cancel(lease_id, call_id)

    def renew(self, ttl_s: float | None = None) -> LeaseInfo:
        """As `AsyncLease.renew`."""
        with self._held() as lease_id:
            return self._settle(self._verbs.renew([lease_id], ttl_s))

    def narrow(self, *, allow_network: bool | None = None, cache: str | None = None) -> LeaseInfo:
        """As `AsyncLease.narrow`."""
        with self._held() as lease_id:
            self.renewed(self._verbs.narrow(lease_id, allow_network=allow_network, cache=cache))
            return self.info

    def release(self, *, reset_workspace: bool = True) -> Released:
        """As `AsyncLease.release`."""
        return self._verbs.release([self.lease_id], reset_workspace=reset_workspace)

    def get_file(self, path: str) -> bytes:
        """As `AsyncLease.get_file`."""
        with self._held() as lease_id:
            return self._verbs.get_file(lease_id, path)

    def get_file_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """As `AsyncLease.get_file_to`."""
        with self._held() as lease_id:
            return self._verbs.get_file_to(lease_id, path, target)

    def stream_file(self, path: str) -> Iterator[bytes]:
        """As `AsyncLease.stream_file`."""
        with self._held() as lease_id:
            yield from self._verbs.stream_file(lease_id, path)

    def put_file(self, path: str, source: Source, *, mode: int | None = None) -> None:
        """As `AsyncLease.put_file`."""
        with self._held() as lease_id:
            self._verbs.put_file(lease_id, path, source, mode=mode)

    def list_files(self, path: str = ".", *, recursive: bool = False) -> tuple[FileEntry, ...]:
        """As `AsyncLease.list_files`."""
        with self._held() as lease_id:
            return self._verbs.list_files(lease_id, path, recursive=recursive)

    def get_archive(self, path: str = ".") -> bytes:
        """As `AsyncLease.get_archive`."""
        with self._held() as lease_id:
            return self._verbs.get_archive(lease_id, path)

    def get_archive_to(self, path: str, target: str | os.PathLike[str]) -> int:
        """As `AsyncLease.get_archive_to`."""
        with self._held() as lease_id:
            return self._verbs.get_archive_to(lease_id, path, target)

    def stream_archive(self, path: str = ".") -> Iterator[bytes]:
        """As `AsyncLease.stream_archive`."""
        with self._held() as lease_id:
            yield from self._verbs.stream_archive(lease_id, path)

    def put_archive(self, path: str, source: Source) -> None:
        """As `AsyncLease.put_archive`."""
        with self._held() as lease_id:
            self._verbs.put_archive(lease_id, path, source)

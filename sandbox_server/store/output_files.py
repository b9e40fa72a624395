"""Files for outputs that are too large to be kept in memory.

Each file holds the output of one call. It exists as long as the record of its call, and as long as a response is being sent from it.
Files are written and deleted in threads, so that a slow disk delays only those who wait for an output.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import tempfile
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import OutputFile
from sandbox_server.core.threads import start_thread_pool
from sandbox_server.store.file_deleter import FileDeleter

WRITE_SIZE_BYTES = 256 << 10
THREAD_COUNT = 2
SEPARATOR = "~"
"""Stands in a file name between the id of the lease and the part that makes the name unique."""


class WrongSize(Exception):
    """An output has more or fewer bytes than was announced."""


@dataclass(frozen=True, kw_only=True)
class FreeSpace:
    """How much of the disk the files with outputs, programs and results leave free, because the state file needs room too: the smaller of the two.

    Attributes:
        free_bytes: so many bytes.
        free_share: this share of the disk, from 0 to 1.
    """

    free_bytes: int = 1 << 30
    free_share: float = 0.05

    def check_room(self, disk: os.statvfs_result, size_bytes: int) -> None:
        """Check that a disk has room for so many more bytes.

        Raises:
            OSError: it has not, with the errno ENOSPC.
        """
        left_free_bytes = min(self.free_bytes, int(disk.f_blocks * disk.f_frsize * self.free_share))
        if disk.f_bavail * disk.f_frsize - size_bytes < left_free_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class OutputFiles:
    """The output files of one service. The files that an earlier process left are kept until their leases are deleted.

    Args:
        folder: the folder of the files; it is created with the first file. None: a temporary folder, which `close` deletes.
        leave_free: how much of the disk is left free.
    """

    def __init__(self, folder: Path | None, leave_free: FreeSpace | None = None) -> None:
        self._folder = folder
        self._leave_free = leave_free or FreeSpace()
        self._paths_by_lease: dict[str, set[str]] = {}
        self._files_in_use: weakref.WeakValueDictionary[str, OutputFile] = weakref.WeakValueDictionary()
        self._threads = start_thread_pool(THREAD_COUNT, "output-files")
        self._deleter = FileDeleter()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is not None and folder.is_dir():
            for entry in os.scandir(folder):
                self._paths_by_lease.setdefault(_lease_id_of(entry.name), set()).add(entry.path)

    def lease_ids(self) -> list[str]:
        """Return the ids of the leases that have files."""
        return list(self._paths_by_lease)

    async def write(self, lease_id: str, chunks: AsyncIterator[bytes], size_bytes: int, stdout_bytes: int | None = None) -> OutputFile:
        """Write an output to a new file.

        Args:
            lease_id: the lease that the call ran under.
            chunks: the output.
            size_bytes: the size of the output.
            stdout_bytes: where the output holds standard output and then standard error: the size of standard output. None otherwise.

        Raises:
            StorageUnavailable: the disk does not have enough room, or cannot be written.
            WrongSize: `chunks` yielded more or fewer bytes than `size_bytes`.
        """
        path = os.path.join(self._ensure_folder(), f"{lease_id}{SEPARATOR}{secrets.token_hex(8)}")
        file = OutputFile(path=path, size_bytes=size_bytes, stdout_bytes=stdout_bytes)
        self._paths_by_lease.setdefault(lease_id, set()).add(path)
        self._files_in_use[path] = file
        with cleanup_on_failure(lambda: self.delete_when_unused(file)):
            try:
                await self._write_chunks(path, chunks, size_bytes)
            except OSError as error:
                raise StorageUnavailable(f"the output of a call cannot be written to {path}: {error.strerror}", retry_after_s=5) from error
        return file

    async def _write_chunks(self, path: str, chunks: AsyncIterator[bytes], size_bytes: int) -> None:
        fd = await self._run_in_thread(_create_file, path, size_bytes, self._leave_free)
        try:
            written_bytes, buffer = 0, bytearray()
            async for chunk in chunks:
                buffer += chunk
                if written_bytes + len(buffer) > size_bytes:
                    break
                if len(buffer) >= WRITE_SIZE_BYTES:
                    written_bytes += await self._run_in_thread(_write_all, fd, bytes(buffer))
                    buffer.clear()
            if written_bytes + len(buffer) != size_bytes:
                raise WrongSize(f"an output of {size_bytes} bytes came as {written_bytes + len(buffer)}")
            await self._run_in_thread(_write_all, fd, bytes(buffer))
        finally:
            await asyncio.shield(self._run_in_thread(os.close, fd))

    async def write_bytes(self, lease_id: str, parts: Iterable[bytes], stdout_bytes: int | None = None) -> OutputFile:
        """Write an output that is in memory to a new file.

        Args:
            lease_id: the lease that the call ran under.
            parts: the output, in parts.
            stdout_bytes: as in `write`.

        Raises:
            StorageUnavailable: the disk does not have enough room, or cannot be written.
        """
        content = list(parts)

        async def chunks() -> AsyncIterator[bytes]:
            for part in content:
                yield part

        return await self.write(lease_id, chunks(), sum(map(len, content)), stdout_bytes)

    def locate(self, file: OutputFile) -> OutputFile:
        """Return the file that a record names, at its path in the current folder: the state folder may have been moved since it was recorded."""
        path = os.path.join(self._ensure_folder(), os.path.basename(file.path))
        in_use = self._files_in_use.get(path)
        if in_use is None:
            in_use = self._files_in_use[path] = OutputFile(path=path, size_bytes=file.size_bytes, stdout_bytes=file.stdout_bytes)
        return in_use

    def delete_files(self, lease_id: str) -> None:
        """Delete the files of a lease. A file that a response is being sent from is deleted after that."""
        for path in self._paths_by_lease.pop(lease_id, ()):
            file = self._files_in_use.get(path)
            if file is None:
                self._deleter.delete(path)
            else:
                weakref.finalize(file, self._deleter.delete, path)

    def delete_when_unused(self, file: OutputFile) -> None:
        """Delete a file that no record names, as soon as nothing refers to `file` any more."""
        lease_id = _lease_id_of(os.path.basename(file.path))
        paths = self._paths_by_lease.get(lease_id, set())
        if file.path in paths:
            paths.discard(file.path)
            if not paths:
                del self._paths_by_lease[lease_id]
            weakref.finalize(file, self._deleter.delete, file.path)

    def _ensure_folder(self) -> str:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="sandbox-outputs-")
            self._folder = Path(self._temporary.name)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return str(self._folder)

    def _run_in_thread(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """End the threads, and delete the folder if it is temporary. Unused files have been deleted when this returns."""
        self._threads.shutdown(wait=True)
        self._deleter.delete_remaining()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary, self._folder = None, None


def _lease_id_of(file_name: str) -> str:
    return file_name.partition(SEPARATOR)[0]


def _create_file(path: str, size_bytes: int, leave_free: FreeSpace) -> int:
    leave_free.check_room(os.statvfs(os.path.dirname(path)), size_bytes)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write_all(fd: int, content: bytes) -> int:
    written_bytes = 0
    while written_bytes < len(content):
        written_bytes += os.write(fd, memoryview(content)[written_bytes:])
    return written_bytes

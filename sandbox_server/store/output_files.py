"""Outputs that are too large to wait in memory: one file each, as long as the record of its call, and as long as somebody sends it.

The files are written, and deleted, by threads: a slow disk holds up whoever waits for an output, and nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import OutputFile
from sandbox_server.core.threads import start_thread_pool

log = logging.getLogger(__name__)

FREE_BYTES = 1 << 30
FREE_SHARE = 0.05
"""So much of the disk is left free, of a small disk this share: the state file needs room."""
WRITTEN_AT_ONCE_BYTES = 256 << 10
THREADS = 2
SEPARATOR = "~"
"""In the name of a file, between the lease and what makes the name unique."""


class WrongSize(Exception):
    """There was more, or less, of an output than was said."""


class OutputFiles:
    """The files of one service. What an earlier life has left is there until its lease is forgotten.

    Args:
        folder: where they are; made with the first file. None: a temporary folder, gone when the store is closed.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._paths: dict[str, set[str]] = {}
        self._live: weakref.WeakValueDictionary[str, OutputFile] = weakref.WeakValueDictionary()
        self._threads = start_thread_pool(THREADS, "output-files")
        self._deleter = _Deleter()
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        if folder is not None and folder.is_dir():
            for entry in os.scandir(folder):
                self._paths.setdefault(entry.name.partition(SEPARATOR)[0], set()).add(entry.path)

    def leases(self) -> list[str]:
        """The leases that have files."""
        return list(self._paths)

    async def write(self, lease_id: str, chunks: AsyncIterator[bytes], size_bytes: int, stdout_bytes: int | None = None) -> OutputFile:
        """Put an output into a file.

        Args:
            lease_id: under which lease its call ran.
            chunks: the output.
            size_bytes: how much it is.
            stdout_bytes: how much of it is standard output, where standard error follows.

        Raises:
            StorageUnavailable: the disk has no room for it, or cannot be written.
            WrongSize: it was not of that size.
        """
        path = os.path.join(self._made_folder(), f"{lease_id}{SEPARATOR}{secrets.token_hex(8)}")
        file = OutputFile(path=path, size_bytes=size_bytes, stdout_bytes=stdout_bytes)
        self._paths.setdefault(lease_id, set()).add(path)
        self._live[path] = file
        try:
            await self._fill(path, chunks, size_bytes)
        except BaseException as error:
            self.delete_when_unused(file)
            if isinstance(error, OSError):
                raise StorageUnavailable(f"the output of a call cannot be written to {path}: {error.strerror}", retry_after_s=5) from error
            raise
        return file

    async def _fill(self, path: str, chunks: AsyncIterator[bytes], size_bytes: int) -> None:
        fd = await self._in_thread(_create, path, size_bytes)
        try:
            written, waiting = 0, bytearray()
            async for chunk in chunks:
                waiting += chunk
                if written + len(waiting) > size_bytes:
                    break
                if len(waiting) >= WRITTEN_AT_ONCE_BYTES:
                    written += await self._in_thread(_write, fd, bytes(waiting))
                    waiting.clear()
            if written + len(waiting) != size_bytes:
                raise WrongSize(f"an output of {size_bytes} bytes came as {written + len(waiting)}")
            await self._in_thread(_write, fd, bytes(waiting))
        finally:
            await asyncio.shield(self._in_thread(os.close, fd))

    async def write_bytes(self, lease_id: str, parts: Iterable[bytes], stdout_bytes: int | None = None) -> OutputFile:
        """Put an output that is in memory into a file. Raises as `write` does."""
        content = list(parts)

        async def chunks() -> AsyncIterator[bytes]:
            for part in content:
                yield part

        return await self.write(lease_id, chunks(), sum(map(len, content)), stdout_bytes)

    def known(self, file: OutputFile) -> OutputFile:
        """The file that a record tells of, wherever the folder was when that was written."""
        path = os.path.join(self._made_folder(), os.path.basename(file.path))
        live = self._live.get(path)
        if live is None:
            live = self._live[path] = OutputFile(path=path, size_bytes=file.size_bytes, stdout_bytes=file.stdout_bytes)
        return live

    def forget(self, lease_id: str) -> None:
        """Delete the files of a lease whose records are forgotten; those that are being sent, when they have been."""
        for path in self._paths.pop(lease_id, ()):
            file = self._live.get(path)
            if file is None:
                self._deleter.delete(path)
            else:
                weakref.finalize(file, self._deleter.delete, path)

    def delete_when_unused(self, file: OutputFile) -> None:
        """Delete a file that no record tells of, once nobody sends it any more."""
        lease_id = os.path.basename(file.path).partition(SEPARATOR)[0]
        paths = self._paths.get(lease_id, set())
        if file.path in paths:
            paths.discard(file.path)
            if not paths:
                del self._paths[lease_id]
            weakref.finalize(file, self._deleter.delete, file.path)

    def _made_folder(self) -> str:
        if self._folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="sandbox-outputs-")
            self._folder = Path(self._temporary.name)
        self._folder.mkdir(mode=0o700, exist_ok=True)
        return str(self._folder)

    def _in_thread(self, work: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def close(self) -> None:
        """End the threads, and delete a temporary folder. Files that are not in use any more have been deleted when this returns."""
        self._threads.shutdown(wait=True)
        self._deleter.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary, self._folder = None, None


def _create(path: str, size_bytes: int) -> int:
    disk = os.statvfs(os.path.dirname(path))
    left_free = min(FREE_BYTES, int(disk.f_blocks * disk.f_frsize * FREE_SHARE))
    if disk.f_bavail * disk.f_frsize - size_bytes < left_free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _write(fd: int, content: bytes) -> int:
    done = 0
    while done < len(content):
        done += os.write(fd, memoryview(content)[done:])
    return done


class _Deleter:
    """Deletes files in a thread of its own.

    The garbage collector calls `delete`, at any moment: also in the middle of a call of `ThreadPoolExecutor.submit`, whose lock is not reentrant. So
    nothing but a `SimpleQueue` lies between, whose `put` is documented to be safe there.
    """

    def __init__(self) -> None:
        self._paths: SimpleQueue[str | None] = SimpleQueue()
        self._closed = False
        # Started at once: later there may be no room for another thread, where a slot's processes take all that their user may have.
        self._thread = threading.Thread(target=self._run, name="output-deleter", daemon=True)
        self._thread.start()

    def delete(self, path: str) -> None:
        """Delete a file soon; at once where the thread has ended."""
        if self._closed:
            _delete(path)
        else:
            self._paths.put(path)

    def close(self) -> None:
        """Delete what is left to delete, and end the thread."""
        self._closed = True
        self._paths.put(None)
        self._thread.join()

    def _run(self) -> None:
        while True:
            path = self._paths.get()
            if path is None:
                return
            _delete(path)


def _delete(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        log.warning("the output file %s could not be deleted: %s", path, error)

"""A local folder as a gzipped tar, made while it is sent."""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from env_client.cli.failures import Failure

_BLOCK = tarfile.BLOCKSIZE
_CHUNK_BYTES = 256 * 1024
_LEVEL = 3  # twice as fast as the usual 6 and a few per cent larger


class PackedFolder:
    """The tree below a folder, each time it is walked anew; so an upload that was cut can be sent again.

    Args:
        folder: its top, which is not in the archive itself.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: Sockets, FIFOs and devices, which are left out.
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[bytes]:
        self.skipped.clear()
        squeeze = zlib.compressobj(_LEVEL, zlib.DEFLATED, 31)
        for piece in self._tar():
            if squeezed := squeeze.compress(piece):
                yield squeezed
        yield squeeze.flush()

    def _tar(self) -> Iterator[bytes]:
        maker = tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)  # makes the headers, and writes nothing
        for path in self._walk():
            name = str(path.relative_to(self._folder))
            info = _header(maker, path, name)
            if not (info.isreg() or info.isdir() or info.issym() or info.islnk()):
                self.skipped.append(name)
                continue
            info.uid = info.gid = 0
            info.uname = info.gname = ""
            yield info.tobuf(tarfile.PAX_FORMAT)
            if info.isreg():
                yield from _content(path, info.size)
        yield b"\0" * (2 * _BLOCK)

    def _walk(self) -> Iterator[Path]:
        for top, folders, files in os.walk(self._folder, onerror=_refuse):
            folders.sort()
            yield from (Path(top, name) for name in sorted({*folders, *files}))


def _header(maker: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo:
    """The header of a file; of a type that tar does not know (a socket), one of a FIFO, which is left out as well."""
    found: tarfile.TarInfo | None = maker.gettarinfo(path, name)
    if found is not None:
        return found
    other = tarfile.TarInfo(name)
    other.type = tarfile.FIFOTYPE
    return other


def _content(path: Path, size_bytes: int) -> Iterator[bytes]:
    left = size_bytes
    with open(path, "rb") as file:
        while left:
            piece = file.read(min(left, _CHUNK_BYTES))
            if not piece:
                raise Failure(f"{path} shrank while it was copied", "copy again once nothing writes to it", "file_error")
            left -= len(piece)
            yield piece
    if size_bytes % _BLOCK:
        yield b"\0" * (_BLOCK - size_bytes % _BLOCK)


def _refuse(error: OSError) -> None:
    raise Failure(f"{error.filename} cannot be read: {error.strerror}", "change its permissions, or copy without it", "file_error")

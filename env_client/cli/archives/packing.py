"""Packing a local folder into a gzipped tar while it is sent."""

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
_COMPRESSION_LEVEL = 3  # twice as fast as the usual level 6, for archives that are a few per cent larger


class PackedFolder:
    """The content of a folder as an archive. Each iteration reads the folder again, so that an interrupted upload can be repeated.

    Args:
        folder: the folder. Names in the archive are relative to it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        #: The sockets, FIFOs and devices that the last iteration left out.
        self.skipped: list[str] = []

    def __iter__(self) -> Iterator[bytes]:
        self.skipped.clear()
        compressor = zlib.compressobj(_COMPRESSION_LEVEL, zlib.DEFLATED, 31)
        for chunk in self._tar_chunks():
            if compressed := compressor.compress(chunk):
                yield compressed
        yield compressor.flush()

    def _tar_chunks(self) -> Iterator[bytes]:
        maker = tarfile.TarFile(fileobj=io.BytesIO(), mode="w", format=tarfile.PAX_FORMAT)  # only creates headers
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
                yield from _content_blocks(path, info.size)
        yield b"\0" * (2 * _BLOCK)

    def _walk(self) -> Iterator[Path]:
        for top, folders, files in os.walk(self._folder, onerror=_raise_unreadable):
            folders.sort()
            yield from (Path(top, name) for name in sorted({*folders, *files}))


def _header(maker: tarfile.TarFile, path: Path, name: str) -> tarfile.TarInfo:
    """Return the header of a file. A type that tar does not know, such as a socket, gets the header of a FIFO, which is left out of the archive as well."""
    found: tarfile.TarInfo | None = maker.gettarinfo(path, name)
    if found is not None:
        return found
    other = tarfile.TarInfo(name)
    other.type = tarfile.FIFOTYPE
    return other


def _content_blocks(path: Path, size_bytes: int) -> Iterator[bytes]:
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


def _raise_unreadable(error: OSError) -> None:
    raise Failure(f"{error.filename} cannot be read: {error.strerror}", "change its permissions, or copy without it", "file_error")

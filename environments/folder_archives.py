"""Folders that are copied into and out of slots as gzipped tar archives. What comes out of a slot was made by a model and is not trusted."""

from __future__ import annotations

import errno
import os
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

CHUNK_BYTES = 1 << 20


class FolderTooLarge(Exception):
    """A folder of a slot is larger than its copy may be."""


@dataclass(frozen=True, slots=True)
class DownloadedFolder:
    """A folder that was copied out of a slot.

    Args:
        file_count: how many files were written.
        size_bytes: the size of all of them together, in bytes.
        skipped: the names of the symbolic links, devices and other members that were left out.
    """

    file_count: int
    size_bytes: int
    skipped: tuple[str, ...]


def pack_folder(folder: Path, target: IO[bytes]) -> None:
    """Write the content of a folder as a gzipped tar.

    Raises:
        NotADirectoryError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    with tarfile.open(fileobj=target, mode="w:gz", compresslevel=1) as archive:
        for path in sorted(folder.iterdir()):
            archive.add(path, arcname=path.name)


def unpack_folder(chunks: Iterable[bytes], unpacked: IO[bytes], folder: Path, max_bytes: int) -> DownloadedFolder:
    """Write the files and folders of a gzipped tar that was made by a model.

    Links are left out, so that no later member can be written through one. A hard link becomes a file of its own.

    Args:
        chunks: the archive.
        unpacked: a temporary file for the archive without compression.
        folder: where to write; it is created.
        max_bytes: the most that the archive without compression, and the files in it together, may have, in bytes.

    Raises:
        FolderTooLarge: there is more.
    """
    _decompress(chunks, unpacked, max_bytes)
    unpacked.seek(0)
    folder.mkdir(parents=True, exist_ok=True)
    file_count, size_bytes, skipped = 0, 0, []
    with tarfile.open(fileobj=unpacked, mode="r:") as archive:
        for member in archive:
            written_bytes = _write_member(archive, member, folder, max_bytes - size_bytes)
            if written_bytes is None:
                skipped.append(member.name)
            elif not member.isdir():
                file_count, size_bytes = file_count + 1, size_bytes + written_bytes
    return DownloadedFolder(file_count, size_bytes, tuple(skipped))


def _decompress(chunks: Iterable[bytes], target: IO[bytes], max_bytes: int) -> None:
    """Write a gzip stream without its compression, in steps, because a small stream can stand for a very large content."""
    decoder, size_bytes = zlib.decompressobj(zlib.MAX_WBITS | 16), 0
    for chunk in chunks:
        rest = chunk
        while piece := decoder.decompress(rest, CHUNK_BYTES):
            size_bytes += len(piece)
            _check_size(size_bytes, max_bytes)
            target.write(piece)
            rest = decoder.unconsumed_tail


def _write_member(archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, max_bytes: int) -> int | None:
    """Write a file or a folder; return its size in bytes, or None if the member is something else or cannot have its name here."""
    path = _path_inside(folder, member.name)
    if path is None or not (member.isdir() or member.isfile() or member.islnk()):
        return None
    try:
        if member.isdir():
            path.mkdir(parents=True, exist_ok=True)
            return 0
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write_file(archive, member, path, max_bytes)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:  # a model can make paths that are longer than the system allows
            return None
        raise


def _write_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path, max_bytes: int) -> int | None:
    """Write a file; return its size in bytes, or None if it is a hard link to nothing in the archive."""
    try:
        content = archive.extractfile(member)
    except KeyError:
        content = None
    if content is None:
        return None
    size_bytes = 0
    with content, open(path, "wb") as file:
        while chunk := content.read(CHUNK_BYTES):
            size_bytes += len(chunk)
            _check_size(size_bytes, max_bytes)
            file.write(chunk)
        os.fchmod(file.fileno(), member.mode & 0o755 | 0o600)
    return size_bytes


def _path_inside(folder: Path, name: str) -> Path | None:
    """Return the path of a member, or None if it would lead out of the folder."""
    path = PurePosixPath(name)
    return None if path.is_absolute() or ".." in path.parts else folder.joinpath(*path.parts)


def _check_size(size_bytes: int, max_bytes: int) -> None:
    if size_bytes > max_bytes:
        raise FolderTooLarge(f"the folder has more than {max_bytes} bytes: raise max_bytes, or copy less of it")

"""A tree that comes out of a slot, into a local folder. What a slot sends is not trusted: nothing is written outside of the folder, or through a link.

The tree is built beside its place, in a folder of our own that holds no link until all else is written, and moved when it is whole.
"""

from __future__ import annotations

import io
import os
import posixpath
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

from env_client.cli.failures import Failure

_CHUNK_BYTES = 256 * 1024


class _Reader(io.RawIOBase):
    """Chunks as a file to read from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def unpack(chunks: Iterator[bytes], target: Path) -> list[str]:
    """Put a gzipped tar into a folder, which is made if it is not there.

    Args:
        chunks: the archive.
        target: the folder; what is in it already is replaced name by name.

    Returns:
        What was left out: links that lead out of the folder, and what is neither file, folder nor link.

    Raises:
        Failure: the archive is broken or hostile, or something is in the way.
    """
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        os.chmod(staging, 0o755)
        left_out = _Tree(staging).fill(chunks)
        _move(staging, target)
        return left_out
    except tarfile.TarError as error:
        raise Failure(f"what came is no whole archive: {error}", "try again", "bad_answer") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _Tree:
    def __init__(self, top: Path) -> None:
        self._top = top
        self._links: list[tuple[Path, str]] = []
        self._folder_modes: list[tuple[Path, int]] = []
        self._left_out: list[str] = []

    def fill(self, chunks: Iterator[bytes]) -> list[str]:
        with tarfile.open(fileobj=io.BufferedReader(_Reader(chunks), _CHUNK_BYTES), mode="r|gz") as archive:
            for member in archive:
                self._member(archive, member)
        for path, destination in self._links:
            path.unlink(missing_ok=True)
            path.symlink_to(destination)
        for path, mode in reversed(self._folder_modes):
            os.chmod(path, mode)
        return self._left_out

    def _member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = self._place(member.name)
        if path == self._top:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir():
            path.mkdir(exist_ok=True)
            self._folder_modes.append((path, member.mode & 0o777))
        elif member.isreg():
            self._file(archive, member, path)
        elif member.islnk():
            path.unlink(missing_ok=True)
            os.link(self._place(member.linkname), path, follow_symlinks=False)
        elif member.issym() and self._stays_inside(member):
            self._links.append((path, member.linkname))
        else:
            self._left_out.append(member.name)

    def _place(self, name: str) -> Path:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise Failure(f"the archive holds the name {name!r}, which leads out of the folder", "nothing was written; do not trust that slot", "bad_answer")
        return self._top.joinpath(*parts)

    @staticmethod
    def _file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        content = archive.extractfile(member)
        assert content is not None
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:
            shutil.copyfileobj(content, file, _CHUNK_BYTES)
        os.chmod(path, member.mode & 0o777)
        os.utime(path, (member.mtime, member.mtime))

    @staticmethod
    def _stays_inside(member: tarfile.TarInfo) -> bool:
        leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
        return not member.linkname.startswith("/") and leads_to != ".." and not leads_to.startswith("../")


def _move(source: Path, target: Path) -> None:
    """Move a folder to its place; into one that is there, name by name."""
    try:
        there = os.lstat(target)
    except FileNotFoundError:
        os.rename(source, target)
        return
    if not stat.S_ISDIR(there.st_mode):
        kind = "a link" if stat.S_ISLNK(there.st_mode) else "a file"
        raise Failure(f"{target} is {kind} here, and a folder in the slot", "remove it, or copy to another name", "file_error")
    for entry in sorted(os.scandir(source), key=lambda one: one.name):
        place = target / entry.name
        if entry.is_dir(follow_symlinks=False):
            _move(Path(entry.path), place)
        elif place.is_dir() and not place.is_symlink():
            raise Failure(f"{place} is a folder here, and a file in the slot", "remove it, or copy to another name", "file_error")
        else:
            os.replace(entry.path, place)

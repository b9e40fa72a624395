"""Unpacking an archive from a slot into a local folder.

The content of a slot is not trusted: nothing is written outside of the folder or through a symbolic link. The tree is built in a staging folder
beside the target, in which links are created last, and is moved to the target once it is complete.
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
from typing import TYPE_CHECKING

from env_client.cli.failures import Failure

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer
_CHUNK_BYTES = 256 * 1024


class _Reader(io.RawIOBase):
    """A file object that reads from an iterator of chunks."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def unpack_archive(chunks: Iterator[bytes], target: Path) -> list[str]:
    """Unpack a gzipped tar into a folder, which is created if it does not exist.

    Args:
        chunks: the archive.
        target: the folder. Files that exist in it are replaced by files of the same name.

    Returns:
        The names that were left out: links that lead out of the folder, and entries that are neither files, folders nor links.

    Raises:
        Failure: the archive is incomplete or hostile, or a local file is in the way.
    """
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        os.chmod(staging, 0o755)
        left_out = _StagingTree(staging).extract_archive(chunks)
        _move_into_place(staging, target)
        return left_out
    except tarfile.TarError as error:
        raise Failure(f"the archive is incomplete or damaged: {error}", "try again", "bad_answer") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _StagingTree:
    """The tree in the staging folder.

    Args:
        top: the staging folder.
    """

    def __init__(self, top: Path) -> None:
        self._top = top
        self._links: list[tuple[Path, str]] = []
        self._folder_modes: list[tuple[Path, int]] = []
        self._left_out: list[str] = []

    def extract_archive(self, chunks: Iterator[bytes]) -> list[str]:
        with tarfile.open(fileobj=io.BufferedReader(_Reader(chunks), _CHUNK_BYTES), mode="r|gz") as archive:
            for member in archive:
                self._extract_member(archive, member)
        for path, destination in self._links:
            path.unlink(missing_ok=True)
            path.symlink_to(destination)
        for path, mode in reversed(self._folder_modes):
            os.chmod(path, mode)
        return self._left_out

    def _extract_member(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = self._local_path(member.name)
        if path == self._top:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if member.isdir():
            path.mkdir(exist_ok=True)
            self._folder_modes.append((path, member.mode & 0o777))
        elif member.isreg():
            self._extract_file(archive, member, path)
        elif member.islnk():
            path.unlink(missing_ok=True)
            os.link(self._local_path(member.linkname), path, follow_symlinks=False)
        elif member.issym() and self._link_stays_inside(member):
            self._links.append((path, member.linkname))
        else:
            self._left_out.append(member.name)

    def _local_path(self, name: str) -> Path:
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise Failure(f"the archive holds the name {name!r}, which leads out of the folder", "nothing was written; do not trust that slot", "bad_answer")
        return self._top.joinpath(*parts)

    @staticmethod
    def _extract_file(archive: tarfile.TarFile, member: tarfile.TarInfo, path: Path) -> None:
        content = archive.extractfile(member)
        assert content is not None
        path.unlink(missing_ok=True)
        with open(path, "xb") as file:
            shutil.copyfileobj(content, file, _CHUNK_BYTES)
        os.chmod(path, member.mode & 0o777)
        os.utime(path, (member.mtime, member.mtime))

    @staticmethod
    def _link_stays_inside(member: tarfile.TarInfo) -> bool:
        leads_to = posixpath.normpath(posixpath.join(posixpath.dirname(member.name), member.linkname))
        return not member.linkname.startswith("/") and leads_to != ".." and not leads_to.startswith("../")


def _move_into_place(source: Path, target: Path) -> None:
    """Move a folder to its place; if a folder is there already, move the entries one by one."""
    try:
        target_stat = os.lstat(target)
    except FileNotFoundError:
        os.rename(source, target)
        return
    if not stat.S_ISDIR(target_stat.st_mode):
        kind = "a link" if stat.S_ISLNK(target_stat.st_mode) else "a file"
        raise Failure(f"{target} is {kind} here, and a folder in the slot", "remove it, or copy to another name", "file_error")
    for entry in sorted(os.scandir(source), key=lambda entry: entry.name):
        place = target / entry.name
        if entry.is_dir(follow_symlinks=False):
            _move_into_place(Path(entry.path), place)
        elif place.is_dir() and not place.is_symlink():
            raise Failure(f"{place} is a folder here, and a file in the slot", "remove it, or copy to another name", "file_error")
        else:
            os.replace(entry.path, place)

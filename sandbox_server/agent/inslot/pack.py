"""route_archive_get: a tree as a gzipped tar, streamed.

Symlinks stay symlinks, further names of one file are hard links, owners and set-id bits are not told. FIFOs, sockets and devices are left out,
and so is what cannot be read; since the header goes first, a walk ahead of the content finds them: `skipped` names the first of them,
`skipped_count` counts them. What becomes unreadable after that walk breaks the answer off instead of going missing unsaid.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zlib

from sandbox_server.agent.inslot.confine import CHUNK_BYTES, READ_FLAGS, Confined, not_regular, show
from sandbox_server.agent.inslot.files import FOLDER_OPEN_FLAGS
from sandbox_server.agent.inslot.reply import BrokenOff
from sandbox_server.agent.inslot.walk import Entry, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

GZIP_LEVEL = 3  # twice as fast as the usual 6 and a few per cent larger
BLOCK_BYTES = 512
MAX_SKIPPED_NAMED = 20


def route_archive_get(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """A tree below a folder, or one file, with names relative to it."""
    place = Confined(args["path"], ctx)
    mode = os.lstat(place.real).st_mode
    if stat.S_ISDIR(mode):
        top = place.open(FOLDER_OPEN_FLAGS)
        try:
            _tree(top, reply)
        finally:
            os.close(top)
        return
    if not stat.S_ISREG(mode):
        raise not_regular(place.asked, mode)
    fd, info = place.open_regular()
    try:
        reply.ok(entries=1, skipped=[], skipped_count=0)
        pack = _Pack(reply)
        pack.regular(os.path.basename(place.real), fd, info)
        pack.finish()
    finally:
        os.close(fd)


def _tree(top: int, reply: Reply) -> None:
    skipped = _Skipped()
    count = sum(_packable(entry, skipped) for entry in walk(top, True, skipped.failed))
    reply.ok(entries=count, skipped=skipped.named, skipped_count=skipped.count)
    pack, late = _Pack(reply), _Skipped()
    for entry in walk(top, True, late.failed):
        if _packable(entry, late):
            pack.entry(entry)
    if late.count > skipped.count:
        raise BrokenOff("something became unreadable while the archive was made")
    pack.finish()


class _Skipped:
    def __init__(self) -> None:
        self.named: list[str] = []
        self.count = 0

    def add(self, path: str, why: str) -> None:
        self.count += 1
        if len(self.named) < MAX_SKIPPED_NAMED:
            self.named.append(f"{show(path):>.1000}: {why}")

    def failed(self, path: str, error: OSError) -> None:
        self.add(path, error.strerror or "cannot be read")


def _packable(entry: Entry, skipped: _Skipped) -> bool:
    mode = entry.info.st_mode
    if stat.S_ISREG(mode) and not os.access(entry.name, os.R_OK, dir_fd=entry.folder_fd, effective_ids=True):
        skipped.add(entry.path, "permission denied")
        return False
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
        return True
    skipped.add(entry.path, "not a file, folder or symlink")
    return False


class _Pack:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._gzip = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 31)
        self._first_name: dict[tuple[int, int], str] = {}

    def entry(self, entry: Entry) -> None:
        """Add one entry of a walk; what has vanished is left out."""
        mode = entry.info.st_mode
        if stat.S_ISDIR(mode):
            self._header(entry.path, entry.info, tarfile.DIRTYPE)
            return
        try:
            if stat.S_ISLNK(mode):
                self._header(entry.path, entry.info, tarfile.SYMTYPE, link=os.readlink(entry.name, dir_fd=entry.folder_fd))
                return
            fd = os.open(entry.name, READ_FLAGS | os.O_NOFOLLOW, dir_fd=entry.folder_fd)
        except FileNotFoundError:
            return
        try:
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode):
                self.regular(entry.path, fd, info)
        finally:
            os.close(fd)

    def regular(self, path: str, fd: int, info: os.stat_result) -> None:
        """Add a file, up to the size it had when it was opened."""
        identity = (info.st_dev, info.st_ino)
        if info.st_nlink > 1 and self._first_name.setdefault(identity, path) != path:
            self._header(path, info, tarfile.LNKTYPE, link=self._first_name[identity])
            return
        self._header(path, info, tarfile.REGTYPE, info.st_size)
        left = info.st_size
        while left:
            data = os.read(fd, min(CHUNK_BYTES, left))
            if not data:
                raise BrokenOff(f"{show(path)} shrank while it was read")
            self._write(data)
            left -= len(data)
        self._write(b"\0" * (-info.st_size % BLOCK_BYTES))

    def finish(self) -> None:
        """The end-of-archive marker and gzip's check sum."""
        self._write(b"\0" * (2 * BLOCK_BYTES))
        self._reply.write(self._gzip.flush())

    def _header(self, path: str, info: os.stat_result, kind: bytes, size_bytes: int = 0, link: str = "") -> None:
        member = tarfile.TarInfo(path)
        member.type, member.size, member.linkname = kind, size_bytes, link
        member.mode = stat.S_IMODE(info.st_mode) & 0o777
        member.mtime = int(info.st_mtime)
        # GNU headers hold names as raw bytes of any length, and every tar reads them.
        self._write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def _write(self, data: bytes) -> None:
        packed = self._gzip.compress(data)
        if packed:
            self._reply.write(packed)

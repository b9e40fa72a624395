"""The operation `route_archive_get`: a tree as a gzipped tar archive, written as a stream.

Symlinks stay symlinks, and further names of one file become hard links. Owners and set-id bits are not stored. FIFOs, sockets, devices and everything that
cannot be read are skipped. Because the header is sent first, a separate walk before the content finds them: `skipped` names the first ones, and
`skipped_count` counts them. If an entry becomes unreadable after that walk, the reply is broken off, so that no entry is missing without notice.
"""

from __future__ import annotations

import os
import stat
import tarfile
import zlib

from sandbox_server.agent.inslot.confine import CHUNK_BYTES, READ_FLAGS, ConfinedPath, quote_path, refusal_not_regular
from sandbox_server.agent.inslot.files import FOLDER_OPEN_FLAGS
from sandbox_server.agent.inslot.reply import IncompleteReply
from sandbox_server.agent.inslot.walk import WalkEntry, walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

GZIP_LEVEL = 3  # Twice as fast as the default level 6; the archive is a few per cent larger.
MAX_SKIPPED_NAMED = 20


def route_archive_get(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Reply with an archive of a folder or of one file. Names in it are relative to the folder, or to the folder of the file."""
    confined = ConfinedPath(args["path"], ctx)
    mode = os.lstat(confined.real).st_mode
    if stat.S_ISDIR(mode):
        top = confined.open(FOLDER_OPEN_FLAGS)
        try:
            _pack_tree(top, reply)
        finally:
            os.close(top)
        return
    if not stat.S_ISREG(mode):
        raise refusal_not_regular(confined.asked, mode)
    fd, info = confined.open_regular()
    try:
        reply.send_ok(entries=1, skipped=[], skipped_count=0)
        archive = _ArchiveWriter(reply)
        archive.add_regular_file(os.path.basename(confined.real), fd, info)
        archive.finish_archive()
    finally:
        os.close(fd)


def _pack_tree(top: int, reply: Reply) -> None:
    skipped = _SkippedEntries()
    count = sum(_can_pack(entry, skipped) for entry in walk(top, True, skipped.add_error))
    reply.send_ok(entries=count, skipped=skipped.named, skipped_count=skipped.count)
    archive, skipped_later = _ArchiveWriter(reply), _SkippedEntries()
    for entry in walk(top, True, skipped_later.add_error):
        if _can_pack(entry, skipped_later):
            archive.add_entry(entry)
    if skipped_later.count > skipped.count:
        raise IncompleteReply("something became unreadable while the archive was made")
    archive.finish_archive()


class _SkippedEntries:
    def __init__(self) -> None:
        self.named: list[str] = []
        self.count = 0

    def add(self, path: str, why: str) -> None:
        self.count += 1
        if len(self.named) < MAX_SKIPPED_NAMED:
            self.named.append(f"{quote_path(path):>.1000}: {why}")

    def add_error(self, path: str, error: OSError) -> None:
        self.add(path, error.strerror or "cannot be read")


def _can_pack(entry: WalkEntry, skipped: _SkippedEntries) -> bool:
    mode = entry.info.st_mode
    if stat.S_ISREG(mode) and not os.access(entry.name, os.R_OK, dir_fd=entry.folder_fd, effective_ids=True):
        skipped.add(entry.path, "permission denied")
        return False
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
        return True
    skipped.add(entry.path, "not a file, folder or symlink")
    return False


class _ArchiveWriter:
    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self._gzip = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, 31)
        self._first_name: dict[tuple[int, int], str] = {}

    def add_entry(self, entry: WalkEntry) -> None:
        """Add one entry of a walk. An entry that has been deleted meanwhile is left out."""
        mode = entry.info.st_mode
        if stat.S_ISDIR(mode):
            self._write_header(entry.path, entry.info, tarfile.DIRTYPE)
            return
        try:
            if stat.S_ISLNK(mode):
                self._write_header(entry.path, entry.info, tarfile.SYMTYPE, link=os.readlink(entry.name, dir_fd=entry.folder_fd))
                return
            fd = os.open(entry.name, READ_FLAGS | os.O_NOFOLLOW, dir_fd=entry.folder_fd)
        except FileNotFoundError:
            return
        try:
            info = os.fstat(fd)
            if stat.S_ISREG(info.st_mode):
                self.add_regular_file(entry.path, fd, info)
        finally:
            os.close(fd)

    def add_regular_file(self, path: str, fd: int, info: os.stat_result) -> None:
        """Add a regular file with the size that it had when it was opened."""
        identity = (info.st_dev, info.st_ino)
        if info.st_nlink > 1 and self._first_name.setdefault(identity, path) != path:
            self._write_header(path, info, tarfile.LNKTYPE, link=self._first_name[identity])
            return
        self._write_header(path, info, tarfile.REGTYPE, info.st_size)
        left = info.st_size
        while left:
            data = os.read(fd, min(CHUNK_BYTES, left))
            if not data:
                raise IncompleteReply(f"{quote_path(path)} shrank while it was read")
            self._write(data)
            left -= len(data)
        self._write(b"\0" * (-info.st_size % tarfile.BLOCKSIZE))

    def finish_archive(self) -> None:
        """Write the end-of-archive marker and the checksum of gzip."""
        self._write(b"\0" * (2 * tarfile.BLOCKSIZE))
        self._reply.write_content(self._gzip.flush())

    def _write_header(self, path: str, info: os.stat_result, kind: bytes, size_bytes: int = 0, link: str = "") -> None:
        member = tarfile.TarInfo(path)
        member.type, member.size, member.linkname = kind, size_bytes, link
        member.mode = stat.S_IMODE(info.st_mode) & 0o777
        member.mtime = int(info.st_mtime)
        # The GNU format stores names as raw bytes of any length, and every tar program can read it.
        self._write(member.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"))

    def _write(self, data: bytes) -> None:
        packed = self._gzip.compress(data)
        if packed:
            self._reply.write_content(packed)

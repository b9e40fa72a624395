"""A gzipped tar as it arrives: its members one after the other, in constant memory.

`tarfile` takes a stream that breaks off, or turns to garbage, for one that has ended; here both are errors.
"""

from __future__ import annotations

import os
import tarfile
import zlib

from sandbox_server.agent.inslot.confine import CHUNK_BYTES, Refusal, show

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

BLOCK_BYTES = 512
MAX_RECORD_BYTES = 1 << 20  # of a long name or an extended header
MAX_PADDING_BYTES = 16 << 20  # after the mark of the end
MAX_NUMBER = 1 << 60
_WITH_CONTENT = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_CONTENT = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)


def invalid(detail: str) -> Refusal:
    """The refusal of an archive that cannot be read."""
    return Refusal("invalid", f"the archive is not a whole gzipped tar: {detail}")


class Gunzip:
    """The unpacked bytes of a gzip stream on a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._zip = zlib.decompressobj(31)
        self._ready = b""
        self._fresh = True  # between two gzip members
        self._first = True
        self._ended = False

    def read(self, at_most: int) -> bytes:
        """Some bytes; none at the end, which is only where gzip's check sum has been seen and was right."""
        while not self._ready and not self._ended:
            self._ready = self._more()
        data, self._ready = self._ready[:at_most], self._ready[at_most:]
        return data

    def exactly(self, size_bytes: int) -> bytes:
        """That many bytes, or fewer only at the end."""
        parts = []
        while size_bytes:
            data = self.read(size_bytes)
            if not data:
                break
            parts.append(data)
            size_bytes -= len(data)
        return b"".join(parts)

    def _more(self) -> bytes:
        if self._zip.eof:
            raw = self._zip.unused_data
            self._zip, self._fresh, self._first = zlib.decompressobj(31), True, False
        else:
            raw = self._zip.unconsumed_tail
        last = not raw
        if not raw:
            raw = os.read(self._fd, CHUNK_BYTES)
            last = not raw
        if self._fresh and not self._first:
            raw = raw.lstrip(b"\0")  # padding of tapes and of some writers
        if self._fresh and not raw:
            self._ended = last
            return b""
        self._fresh = False
        try:
            data = self._zip.decompress(raw, CHUNK_BYTES)
        except zlib.error as error:
            raise invalid(str(error)) from None
        if last and not data and not self._zip.eof:
            raise invalid("it breaks off")
        return data


class Member:
    """What a header says, with the extended headers before it applied."""

    def __init__(self, info: tarfile.TarInfo, extended: dict[str, str]) -> None:
        self.path = extended.get("path", info.name)
        self.target = extended.get("linkpath", info.linkname)
        self.kind = info.type
        self.mode = info.mode & 0o777
        self.mtime = _number(extended.get("mtime", info.mtime), float)
        size_bytes = int(_number(extended.get("size", info.size), int))
        self.size_bytes = size_bytes if info.type in _WITH_CONTENT or info.type not in _WITHOUT_CONTENT else 0
        if self.size_bytes < 0:
            raise invalid(f"{show(self.path)} has a negative size")
        if info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in extended):
            raise Refusal("invalid", f"{show(self.path)} is stored as a sparse file, which is not taken: pack it without --sparse")


def _number(text: str | float, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
        if abs(value) <= MAX_NUMBER:  # which a NaN is not
            return value
    except (ValueError, OverflowError):
        pass
    raise invalid(f"it holds the number {ascii(text)[:50]}")


class TarStream:
    """Members of a gzipped tar; the content of each is read before the next is asked for, or skipped."""

    def __init__(self, fd: int) -> None:
        self._in = Gunzip(fd)
        self._left = 0
        self._padding = 0

    def __iter__(self) -> Iterator[Member]:
        extended: dict[str, str] = {}
        while True:
            self._skip()
            info = self._header()
            if info is None:
                break
            if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                key = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
                extended[key] = _text(self._record(info.size).rstrip(b"\0"))
            elif info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extended.update(_records(self._record(info.size)))
            elif info.type == tarfile.XGLTYPE:
                self._record(info.size)  # of the whole archive: comments, such as git's commit
            else:
                member, extended = Member(info, extended), {}
                self._expect(member.size_bytes)
                yield member
        # Up to gzip's check sum, so that a broken stream is not taken for a whole one.
        if len(self._in.exactly(MAX_PADDING_BYTES + 1)) > MAX_PADDING_BYTES:
            raise invalid("it goes on long after the mark of its end")

    def read(self) -> bytes:
        """Some of the current member's content; none at its end."""
        if not self._left:
            return b""
        data = self._in.read(min(self._left, CHUNK_BYTES))
        if not data:
            raise invalid("it ends inside a file")
        self._left -= len(data)
        return data

    def _expect(self, size_bytes: int) -> None:
        self._left, self._padding = size_bytes, -size_bytes % BLOCK_BYTES

    def _skip(self) -> None:
        while self.read():
            pass
        if len(self._in.exactly(self._padding)) < self._padding:
            raise invalid("it ends inside a file")
        self._padding = 0

    def _header(self) -> tarfile.TarInfo | None:
        block = self._in.exactly(BLOCK_BYTES)
        if len(block) < BLOCK_BYTES:
            raise invalid("it ends without the mark of its end")
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return None
        except (tarfile.HeaderError, ValueError, OverflowError) as error:
            raise invalid(f"a header cannot be read ({error})") from None

    def _record(self, size_bytes: int) -> bytes:
        if not 0 <= size_bytes <= MAX_RECORD_BYTES:
            raise invalid(f"an extended header of {int(size_bytes)} bytes")
        self._expect(size_bytes)
        return b"".join(iter(self.read, b""))


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _records(raw: bytes) -> dict[str, str]:
    """The `length key=value` lines of an extended header."""
    found: dict[str, str] = {}
    while raw.strip(b"\0"):
        length_text, _, _ = raw[:20].partition(b" ")
        length = int(length_text) if length_text.isdigit() else 0
        line = raw[len(length_text) + 1 : length]
        if not line.endswith(b"\n") or length > len(raw) or b"=" not in line:
            raise invalid("an extended header is garbled")
        key, _, value = line[:-1].partition(b"=")
        found[_text(key)] = _text(value)
        raw = raw[length:]
    return found

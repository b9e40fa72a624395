"""Reads a gzipped tar archive from a stream, member by member, in constant memory.

`tarfile` treats a truncated or corrupt stream as if it had ended. Here both are errors.
"""

from __future__ import annotations

import os
import tarfile
import zlib

from sandbox_server.agent.inslot.confine import CHUNK_BYTES, Refusal, quote_path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator

MAX_RECORD_BYTES = 1 << 20  # Of a long name or an extended header.
MAX_PADDING_BYTES = 16 << 20  # After the end-of-archive marker.
MAX_NUMBER = 1 << 60
_WITH_CONTENT = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
_WITHOUT_CONTENT = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE)


def refusal_invalid_archive(detail: str) -> Refusal:
    """Return the refusal of an archive that cannot be read."""
    return Refusal("invalid", f"the archive is not a whole gzipped tar: {detail}")


class Gunzip:
    """Decompresses a gzip stream that is read from a descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._zip = zlib.decompressobj(31)
        self._ready = b""
        self._between_members = True
        self._in_first_member = True
        self._ended = False

    def read(self, at_most: int) -> bytes:
        """Return at most `at_most` decompressed bytes. No bytes mean the end of the stream, whose checksum has then been verified."""
        while not self._ready and not self._ended:
            self._ready = self._decompress_more()
        data, self._ready = self._ready[:at_most], self._ready[at_most:]
        return data

    def read_exactly(self, size_bytes: int) -> bytes:
        """Return `size_bytes` decompressed bytes, or fewer only at the end of the stream."""
        parts = []
        while size_bytes:
            data = self.read(size_bytes)
            if not data:
                break
            parts.append(data)
            size_bytes -= len(data)
        return b"".join(parts)

    def _decompress_more(self) -> bytes:
        if self._zip.eof:
            raw = self._zip.unused_data
            self._zip, self._between_members, self._in_first_member = zlib.decompressobj(31), True, False
        else:
            raw = self._zip.unconsumed_tail
        last = not raw
        if not raw:
            raw = os.read(self._fd, CHUNK_BYTES)
            last = not raw
        if self._between_members and not self._in_first_member:
            raw = raw.lstrip(b"\0")  # Tapes and some programs pad the end of an archive with NUL bytes.
        if self._between_members and not raw:
            self._ended = last
            return b""
        self._between_members = False
        try:
            data = self._zip.decompress(raw, CHUNK_BYTES)
        except zlib.error as error:
            raise refusal_invalid_archive(str(error)) from None
        if last and not data and not self._zip.eof:
            raise refusal_invalid_archive("it is truncated")
        return data


class Member:
    """One member of an archive, as its header and the extended headers before it describe it."""

    def __init__(self, info: tarfile.TarInfo, extended: dict[str, str]) -> None:
        self.path = extended.get("path", info.name)
        self.target = extended.get("linkpath", info.linkname)
        self.kind = info.type
        self.mode = info.mode & 0o777
        self.mtime = _parse_number(extended.get("mtime", info.mtime), float)
        size_bytes = int(_parse_number(extended.get("size", info.size), int))
        self.size_bytes = size_bytes if info.type in _WITH_CONTENT or info.type not in _WITHOUT_CONTENT else 0
        if self.size_bytes < 0:
            raise refusal_invalid_archive(f"{quote_path(self.path)} has a negative size")
        if info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in extended):
            raise Refusal("invalid", f"{quote_path(self.path)} is stored as a sparse file, which is not supported: pack it without --sparse")


def _parse_number(text: str | float, kind: type[int] | type[float]) -> float:
    try:
        value = kind(text)
        if abs(value) <= MAX_NUMBER:  # False for a NaN.
            return value
    except (ValueError, OverflowError):
        pass
    raise refusal_invalid_archive(f"it contains the invalid number {ascii(text)[:50]}")


class TarStream:
    """Iterates over the members of a gzipped tar archive. Content that the caller has not read is skipped when the next member is requested."""

    def __init__(self, fd: int) -> None:
        self._gunzip = Gunzip(fd)
        self._content_left_bytes = 0
        self._padding_bytes = 0

    def __iter__(self) -> Iterator[Member]:
        extended: dict[str, str] = {}
        while True:
            self._skip_content()
            info = self._read_header()
            if info is None:
                break
            if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
                key = "path" if info.type == tarfile.GNUTYPE_LONGNAME else "linkpath"
                extended[key] = _decode_name(self._read_record(info.size).rstrip(b"\0"))
            elif info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                extended.update(_parse_pax_records(self._read_record(info.size)))
            elif info.type == tarfile.XGLTYPE:
                self._read_record(info.size)  # A global header, such as the commit that git stores; it has no effect on members.
            else:
                member, extended = Member(info, extended), {}
                self._begin_content(member.size_bytes)
                yield member
        # Read up to the checksum of gzip, so that a corrupt stream is noticed.
        if len(self._gunzip.read_exactly(MAX_PADDING_BYTES + 1)) > MAX_PADDING_BYTES:
            raise refusal_invalid_archive("it continues long after its end-of-archive marker")

    def read(self) -> bytes:
        """Return some of the content of the current member, or no bytes at its end."""
        if not self._content_left_bytes:
            return b""
        data = self._gunzip.read(min(self._content_left_bytes, CHUNK_BYTES))
        if not data:
            raise refusal_invalid_archive("it ends inside a file")
        self._content_left_bytes -= len(data)
        return data

    def _begin_content(self, size_bytes: int) -> None:
        self._content_left_bytes, self._padding_bytes = size_bytes, -size_bytes % tarfile.BLOCKSIZE

    def _skip_content(self) -> None:
        while self.read():
            pass
        if len(self._gunzip.read_exactly(self._padding_bytes)) < self._padding_bytes:
            raise refusal_invalid_archive("it ends inside a file")
        self._padding_bytes = 0

    def _read_header(self) -> tarfile.TarInfo | None:
        """Return the next header; None at the end-of-archive marker, which begins with a block of NULs."""
        block = self._gunzip.read_exactly(tarfile.BLOCKSIZE)
        if len(block) < tarfile.BLOCKSIZE:
            raise refusal_invalid_archive("it ends without an end-of-archive marker")
        if not block.strip(b"\0"):
            return None
        try:
            return tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError, OverflowError) as error:
            raise refusal_invalid_archive(f"a header cannot be read ({error})") from None

    def _read_record(self, size_bytes: int) -> bytes:
        if not 0 <= size_bytes <= MAX_RECORD_BYTES:
            raise refusal_invalid_archive(f"it contains an extended header of {int(size_bytes)} bytes")
        self._begin_content(size_bytes)
        return b"".join(iter(self.read, b""))


def _decode_name(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _parse_pax_records(raw: bytes) -> dict[str, str]:
    """Parse the `length key=value` lines of an extended header."""
    found: dict[str, str] = {}
    while raw.strip(b"\0"):
        length_text, _, _ = raw[:20].partition(b" ")
        length = int(length_text) if length_text.isdigit() else 0
        line = raw[len(length_text) + 1 : length]
        if not line.endswith(b"\n") or length > len(raw) or b"=" not in line:
            raise refusal_invalid_archive("an extended header is malformed")
        key, _, value = line[:-1].partition(b"=")
        found[_decode_name(key)] = _decode_name(value)
        raw = raw[length:]
    return found

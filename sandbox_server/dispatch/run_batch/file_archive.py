"""Packs the files of a program into the archive that an agent unpacks in its slot."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import AsyncGenerator, Mapping

CHUNK_BYTES = 64 << 10
FILE_MODE = 0o644
COMPRESSION_LEVEL = 1
"""Programs are small, and the archive goes to an agent on the same machine or network: speed counts more than size."""


def pack_files(files: Mapping[str, bytes]) -> bytes:
    """Make a gzipped tar archive of files. Their folders are made when they are unpacked.

    Args:
        files: the content of each file, by its path.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for path, content in files.items():
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), FILE_MODE
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(packed.getbuffer(), compresslevel=COMPRESSION_LEVEL, mtime=0)


async def content_chunks(content: bytes) -> AsyncGenerator[bytes, None]:
    """Yield an archive or the content of a file in chunks."""
    for start in range(0, len(content), CHUNK_BYTES):
        yield content[start : start + CHUNK_BYTES]

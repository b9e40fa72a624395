"""Tests of folders that come out of a slot as archives: nothing that a model puts into one leads out of the folder, or fills the disk."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest

from environments.folder_archives import DownloadedFolder, FolderTooLarge, pack_folder, unpack_folder


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:gz") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return target.getvalue()


def unpack(data: bytes, folder: Path, max_bytes: int = 1 << 20, chunk_bytes: int = 1000) -> DownloadedFolder:
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    return unpack_folder(chunks, io.BytesIO(), folder, max_bytes)


def test_a_folder_comes_back_as_it_went(tmp_path: Path) -> None:
    source, target = tmp_path / "source", io.BytesIO()
    (source / "deep" / "er").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a b.txt").write_bytes(b"a" * 100_000)
    (source / "deep" / "er" / "run.sh").write_text("#!/bin/sh\n")
    (source / "deep" / "er" / "run.sh").chmod(0o755)
    os.link(source / "a b.txt", source / "linked.txt")

    pack_folder(source, target)
    folder = unpack(target.getvalue(), tmp_path / "new" / "copy")

    copy = tmp_path / "new" / "copy"
    assert folder == DownloadedFolder(3, 200_010, ())
    assert sorted(str(path.relative_to(copy)) for path in copy.rglob("*")) == ["a b.txt", "deep", "deep/er", "deep/er/run.sh", "empty", "linked.txt"]
    assert (copy / "a b.txt").read_bytes() == (copy / "linked.txt").read_bytes() == b"a" * 100_000
    assert os.access(copy / "deep" / "er" / "run.sh", os.X_OK)


def test_only_a_folder_is_packed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    with pytest.raises(NotADirectoryError, match="is not a folder"):
        pack_folder(tmp_path / "file", io.BytesIO())


def test_nothing_leads_out_of_the_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    data = packed(
        member("../outside/up", b"x"),
        member(str(outside / "absolute"), b"x"),
        member("deep/../../outside/dots", b"x"),
        member("link", type=tarfile.SYMTYPE, linkname=str(outside)),
        member("link/through", b"inside"),
        member("file", type=tarfile.SYMTYPE, linkname="../outside/new"),
        member("file", b"inside"),
        member("hard", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
        member("hard2", type=tarfile.LNKTYPE, linkname="link"),
        member("device", type=tarfile.CHRTYPE),
        member("pipe", type=tarfile.FIFOTYPE),
        member("setuid", b"x", mode=0o6777),
    )

    folder = unpack(data, tmp_path / "copy")

    assert list(outside.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "outside"]
    assert {"../outside/up", "deep/../../outside/dots", "link", "file", "hard", "device", "pipe"} <= set(folder.skipped)
    assert (tmp_path / "copy" / "link" / "through").read_bytes() == (tmp_path / "copy" / "file").read_bytes() == b"inside"
    assert (tmp_path / "copy" / "setuid").stat().st_mode & 0o7777 == 0o755


def test_names_that_cannot_be_are_left_out(tmp_path: Path) -> None:
    deep = "/".join(["d" * 200] * 30)
    folder = unpack(packed(member(deep + "/file", b"x"), member("n" * 300, b"x"), member("good", b"x")), tmp_path)

    assert (folder.file_count, folder.skipped) == (1, (deep + "/file", "n" * 300))


@pytest.mark.parametrize("chunk_bytes", [1, 1000, 10**9])
def test_a_small_archive_of_a_large_folder_is_refused_before_it_fills_the_disk(tmp_path: Path, chunk_bytes: int) -> None:
    unpacked = io.BytesIO()
    data = gzip.compress(bytes(64 << 20))
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]

    with pytest.raises(FolderTooLarge, match="more than 1048576 bytes"):
        unpack_folder(chunks, unpacked, tmp_path, 1 << 20)
    assert len(unpacked.getvalue()) <= 1 << 20


def test_hard_links_count_as_files(tmp_path: Path) -> None:
    links = [member(f"link-{number}", type=tarfile.LNKTYPE, linkname="file") for number in range(20)]

    with pytest.raises(FolderTooLarge):
        unpack(packed(member("file", bytes(100_000)), *links), tmp_path)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= (1 << 20) + 100_000

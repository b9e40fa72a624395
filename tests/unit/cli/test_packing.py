"""Tests of packing folders, and of unpacking archives that may be hostile."""

from __future__ import annotations

import gzip
import io
import os
import socket
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from env_client.cli.archives.packing import PackedFolder
from env_client.cli.archives.unpacking import unpack_archive
from env_client.cli.failures import Failure


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "sub" / "empty").mkdir(parents=True)
    (top / "a").write_bytes(os.urandom(300_000))
    (top / "sub" / ("ä" * 70)).write_text("long name")
    (top / "sub" / "same").hardlink_to(top / "a")
    (top / "link").symlink_to("sub")
    (top / "a").chmod(0o640)
    return top


def archive(*members: tuple[str, bytes | None, dict[str, object]]) -> Iterator[bytes]:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as made:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.mode = 0o644
            for field, value in fields.items():
                setattr(info, field, value)
            info.size = len(content or b"")
            made.addfile(info, io.BytesIO(content or b""))
    return iter([buffer.getvalue()])


def link(name: str, target: str) -> tuple[str, None, dict[str, object]]:
    return name, None, {"type": tarfile.SYMTYPE, "linkname": target}


class TestPacked:
    def test_goes_in_and_comes_out(self, tree: Path, tmp_path: Path) -> None:
        left_out = unpack_archive(iter(PackedFolder(tree)), tmp_path / "out")

        assert left_out == []
        assert (tmp_path / "out" / "a").read_bytes() == (tree / "a").read_bytes()
        assert (tmp_path / "out" / "sub" / ("ä" * 70)).read_text() == "long name"
        assert (tmp_path / "out" / "sub" / "same").read_bytes() == (tree / "a").read_bytes()
        assert (tmp_path / "out" / "sub" / "empty").is_dir()
        assert os.readlink(tmp_path / "out" / "link") == "sub"
        assert (tmp_path / "out" / "a").stat().st_mode & 0o777 == 0o640
        assert int((tmp_path / "out" / "a").stat().st_mtime) == int((tree / "a").stat().st_mtime)

    def test_can_be_sent_again(self, tree: Path) -> None:
        packed = PackedFolder(tree)

        assert b"".join(packed) == b"".join(packed)
        assert iter(packed) is not packed

    def test_is_an_archive_as_others_read_it(self, tree: Path) -> None:
        with tarfile.open(fileobj=io.BytesIO(gzip.decompress(b"".join(PackedFolder(tree))))) as made:
            assert made.getnames() == ["a", "link", "sub", "sub/empty", "sub/same", "sub/" + "ä" * 70]
            assert {member.uname for member in made} == {""}

    def test_leaves_out_what_is_no_file(self, tree: Path) -> None:
        os.mkfifo(tree / "fifo")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tree / "socket"))
            packed = PackedFolder(tree)
            b"".join(packed)

        assert packed.skipped == ["fifo", "socket"]


class TestUnpack:
    @pytest.mark.parametrize("name", ["../out", "/etc/x", "a/../../x"])
    def test_a_name_that_leads_out_is_refused(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(Failure, match="leads out"):
            unpack_archive(archive((name, b"x", {})), tmp_path / "out")
        assert list(tmp_path.iterdir()) == []

    def test_nothing_is_written_through_a_link(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        hostile = archive(link("sub", str(tmp_path / "outside")), ("sub/x", b"evil", {}))

        left_out = unpack_archive(hostile, tmp_path / "out")

        assert left_out == ["sub"]
        assert list((tmp_path / "outside").iterdir()) == []
        assert (tmp_path / "out" / "sub" / "x").read_bytes() == b"evil"

    @pytest.mark.parametrize("target", ["/etc/passwd", "../x", "a/../../x"])
    def test_links_that_lead_out_are_left_out(self, tmp_path: Path, target: str) -> None:
        assert unpack_archive(archive(link("l", target), link("ok", "l2"), ("l2", b"", {})), tmp_path / "out") == ["l"]
        assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["l2", "ok"]

    def test_a_link_that_is_there_already_is_not_followed(self, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "sub").symlink_to(tmp_path / "outside")

        with pytest.raises(Failure, match="is a link here"):
            unpack_archive(archive(("sub/x", b"evil", {})), tmp_path / "out")
        assert list((tmp_path / "outside").iterdir()) == []

    def test_a_link_becomes_no_file_that_is_linked_to(self, tmp_path: Path) -> None:
        (tmp_path / "mine").write_text("mine")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "f").symlink_to(tmp_path / "mine")

        unpack_archive(archive(("f", b"new", {})), tmp_path / "out")

        assert (tmp_path / "mine").read_text() == "mine"
        assert (tmp_path / "out" / "f").read_text() == "new"

    def test_devices_and_rights_of_others_are_not_taken(self, tmp_path: Path) -> None:
        left_out = unpack_archive(archive(("null", None, {"type": tarfile.CHRTYPE}), ("f", b"x", {"mode": 0o4755, "uid": 4242})), tmp_path / "out")

        assert left_out == ["null"]
        assert (tmp_path / "out" / "f").stat().st_mode & 0o7777 == 0o755
        assert (tmp_path / "out" / "f").stat().st_uid == os.getuid()

    def test_existing_folders_are_merged(self, tmp_path: Path) -> None:
        (tmp_path / "out" / "sub").mkdir(parents=True)
        (tmp_path / "out" / "sub" / "old").write_text("old")

        unpack_archive(archive(("sub/new", b"new", {}), ("top", b"", {})), tmp_path / "out")

        assert sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")) == ["sub", "sub/new", "sub/old", "top"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]

    def test_an_incomplete_archive_leaves_nothing(self, tmp_path: Path, tree: Path) -> None:
        whole = b"".join(PackedFolder(tree))

        with pytest.raises(Failure, match="incomplete or damaged"):
            unpack_archive(iter([whole[: len(whole) // 2]]), tmp_path / "out")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["tree"]

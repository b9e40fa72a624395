from __future__ import annotations

import gzip
import io
import os
import resource
import socket
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from tests.unit.agent.inslot.asking import DEPTH, NAME, Answer, Slot, allow_few_descriptors, limit_memory, make_deep, names_below


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644, content: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.size = kind, target, mode, len(content)
    return info, content


def tar(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as out:
        for info, content in members:
            out.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tgz(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    return gzip.compress(tar(*members, form=form), compresslevel=1)


def put(slot: Slot, *members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> Answer:
    return slot.ask("route_archive_put", tgz(*members, form=form), path=".")


def unpacked(answer: Answer) -> dict[str, tarfile.TarInfo]:
    assert answer.status == 0
    with tarfile.open(fileobj=io.BytesIO(answer.body), mode="r:gz") as archive:
        return {info.name: info for info in archive}


@pytest.fixture
def tree(slot: Slot) -> Slot:
    top = slot.workspace / "top"
    (top / "sub/empty").mkdir(parents=True)
    (top / "sub/a").write_text("a" * 1000)
    (top / "sub/run").write_text("#!/bin/sh\n")
    (top / "sub/run").chmod(0o755)
    os.utime(top / "sub/a", (1_000_000, 1_000_000))
    os.link(top / "sub/a", top / "sub/b")
    (top / "link").symlink_to("sub/a")
    (top / ("long" * 60)).write_text("long")
    Path(os.fsdecode(os.fsencode(top) + b"/caf\xe9\n")).write_text("strange")
    return slot


def test_a_tree_goes_out_and_in_again(tree: Slot) -> None:
    answer = tree.ask("route_archive_get", path="top")
    assert (answer.header["entries"], answer.header["skipped_count"]) == (8, 0)
    again = tree.ask("route_archive_put", answer.body, path="new/place")
    assert again.header == {"ok": True, "entries": 8}
    assert names_below(tree.workspace / "new/place") == names_below(tree.workspace / "top")
    sub = tree.workspace / "new/place/sub"
    assert (sub / "a").read_text() == "a" * 1000
    assert (sub / "a").stat().st_mtime == 1_000_000
    assert (sub / "a").stat().st_ino == (sub / "b").stat().st_ino
    assert stat.S_IMODE((sub / "run").stat().st_mode) == 0o755
    assert os.readlink(sub / "../link") == "sub/a"


def test_tar_reads_what_we_write_and_the_other_way_round(tree: Slot, base: Path) -> None:
    there = base / "there"
    there.mkdir()
    subprocess.run(["tar", "xzf", "-", "-C", there], input=tree.ask("route_archive_get", path="top").body, check=True)
    assert names_below(there) == names_below(tree.workspace / "top")
    for number, form in enumerate(("gnu", "pax", "ustar", "v7")):
        long = ["--exclude=long*"] if form in ("ustar", "v7") else []
        made = subprocess.run(["tar", "czf", "-", f"--format={form}", *long, "-C", there, "."], capture_output=True, check=True).stdout
        tree.ask("route_archive_put", made, path=f"out{number}")
        wanted = [name for name in names_below(there) if not (long and "long" in name)]
        assert names_below(tree.workspace / f"out{number}") == wanted


def test_symlinks_stay_symlinks_and_nothing_outside_is_told(tree: Slot) -> None:
    (tree.workspace / "top/out").symlink_to(tree.outside)
    (tree.outside / "secret").write_text("secret")
    names = unpacked(tree.ask("route_archive_get", path="top"))
    assert names["out"].issym()
    assert not any("secret" in name for name in names)


def test_one_file_is_an_archive_too(tree: Slot) -> None:
    assert list(unpacked(tree.ask("route_archive_get", path="top/sub/a"))) == ["a"]


def test_fifos_sockets_and_set_id_bits_are_left_out(tree: Slot) -> None:
    os.mkfifo(tree.workspace / "top/fifo")
    (tree.workspace / "top/sub/run").chmod(0o6755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree.workspace / "top/sock"))
        answer = tree.ask("route_archive_get", path="top")
    names = unpacked(answer)
    assert answer.header["skipped"] == ["fifo: not a file, folder or symlink", "sock: not a file, folder or symlink"]
    assert not {"fifo", "sock"} & set(names)
    assert names["sub/run"].mode == 0o755


def test_what_cannot_be_read_is_said_in_the_header(nobody: Slot) -> None:
    for name in ("a", "b"):
        (nobody.workspace / name).write_text(name)
    (nobody.workspace / "a").chmod(0)
    (nobody.workspace / "closed").mkdir()
    (nobody.workspace / "closed/x").touch()
    (nobody.workspace / "closed").chmod(0)
    answer = nobody.ask("route_archive_get", path=".")
    assert answer.header["skipped"] == ["a: permission denied", "closed: Permission denied"]
    assert answer.header["skipped_count"] == 2
    assert sorted(unpacked(answer)) == ["b", "closed"]


def test_trees_deeper_than_a_path_may_be_go_out_and_in(slot: Slot) -> None:
    (slot.workspace / "deep").mkdir()
    make_deep(slot.workspace / "deep")

    answer = slot.ask("route_archive_get", before=allow_few_descriptors, path="deep")
    assert answer.header["entries"] == DEPTH + 1
    assert slot.ask("route_archive_put", answer.body, before=allow_few_descriptors, path="again").header["entries"] == DEPTH + 1
    found = slot.ask("search_files", path="again", pattern="needle")
    assert found.text == "again/" + f"{NAME}/" * DEPTH + "leaf:1:needle\n"


LEADS_OUT = {
    "absolute": [member("/tmp/evil")],
    "dots": [member("a/../../evil")],
    "dots at the end": [member("..", tarfile.DIRTYPE)],
    "through a symlink that it brings": [member("way", tarfile.SYMTYPE, "../outside"), member("way/evil")],
    "through an absolute symlink that it brings": [member("way", tarfile.SYMTYPE, "/etc"), member("way/evil")],
    "through a symlink to a symlink": [member("here", tarfile.SYMTYPE, "."), member("way", tarfile.SYMTYPE, "here/here/../outside"), member("way/evil")],
    "hard link out": [member("evil", tarfile.LNKTYPE, "/etc/passwd")],
    "hard link up": [member("evil", tarfile.LNKTYPE, "../outside/secret")],
    "through a symlink that was there": [member("out/evil")],
    "folder through a symlink that was there": [member("out/evil", tarfile.DIRTYPE)],
    "folder that is such a symlink": [member("out", tarfile.DIRTYPE)],
    "hard link through a symlink that was there": [member("evil", tarfile.LNKTYPE, "out/secret")],
}


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("name", LEADS_OUT)
def test_members_that_lead_out_are_refused_by_name(slot: Slot, name: str, form: int) -> None:
    (slot.outside / "secret").write_text("secret")
    (slot.workspace / "out").symlink_to(slot.outside)
    answer = put(slot, member("before", content=b"x"), *LEADS_OUT[name], member("after"), form=form)
    assert answer.refused == ("path_outside", None)
    assert LEADS_OUT[name][-1][0].name in answer.detail or LEADS_OUT[name][-1][0].linkname in answer.detail
    assert names_below(slot.outside) == ["secret"]
    assert not list(slot.workspace.rglob("evil"))
    assert not (slot.workspace / "after").exists()
    assert (slot.workspace / "before").read_text() == "x"


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, b"M", b"V"])
def test_kinds_that_are_not_taken_are_refused_by_name(slot: Slot, kind: bytes) -> None:
    answer = put(slot, member("evil", kind))
    assert answer.refused == ("invalid", None)
    assert answer.detail.startswith("evil is ")
    assert names_below(slot.workspace) == []


@pytest.mark.parametrize("target", ["missing", "no/such/folder", "link", "folder", "."])
def test_a_hard_link_needs_a_file_before_it(slot: Slot, target: str) -> None:
    answer = put(slot, member("folder", tarfile.DIRTYPE), member("link", tarfile.SYMTYPE, "folder"), member("evil", tarfile.LNKTYPE, target))
    assert answer.refused == ("invalid", None)
    assert answer.detail.startswith(f"evil is a hard link to {target}")
    assert names_below(slot.workspace) == ["folder", "link"]


def test_symlinks_and_folders_that_stay_inside_are_used(slot: Slot) -> None:
    (slot.tmp / "data").mkdir()
    (slot.workspace / "data").symlink_to(slot.tmp / "data")
    answer = put(slot, member("data/a", content=b"in tmp"), member("l", tarfile.SYMTYPE, "data/a"), member("abs", tarfile.SYMTYPE, str(slot.tmp)))
    assert answer.header == {"ok": True, "entries": 3}
    assert (slot.tmp / "data/a").read_text() == "in tmp"
    assert (slot.workspace / "l").read_text() == "in tmp"


def test_symlinks_come_in_as_they_are_wherever_they_point(slot: Slot) -> None:
    answer = put(slot, member("python", tarfile.SYMTYPE, "/usr/bin/python3"), member("up", tarfile.SYMTYPE, "../outside"))
    assert answer.header == {"ok": True, "entries": 2}
    assert os.readlink(slot.workspace / "python") == "/usr/bin/python3"
    assert os.readlink(slot.workspace / "up") == "../outside"


def test_what_is_there_is_replaced_and_symlinks_are_not_written_through(slot: Slot) -> None:
    (slot.outside / "secret").write_text("secret")
    (slot.workspace / "a").symlink_to(slot.outside / "secret")
    os.mkfifo(slot.workspace / "fifo")
    (slot.workspace / "folder").mkdir()
    assert put(slot, member("a", content=b"new"), member("fifo", content=b"new")).header["ok"]
    assert (slot.outside / "secret").read_text() == "secret"
    assert [(slot.workspace / name).read_text() for name in ("a", "fifo")] == ["new", "new"]
    assert put(slot, member("folder", content=b"x")).refused == ("file_error", "EISDIR")
    assert put(slot, member("a/below")).refused == ("file_error", "ENOTDIR")


def test_modes_come_without_set_id_bits_and_closed_folders_can_be_filled(nobody: Slot) -> None:
    answer = put(
        nobody,
        member("closed/in", tarfile.DIRTYPE, mode=0o500),
        member("closed", tarfile.DIRTYPE, mode=0),
        member("closed/in/a", mode=0o4755, content=b"x"),
        member("wide", tarfile.DIRTYPE, mode=0o7777),
    )
    assert answer.header["ok"], answer.header
    assert stat.S_IMODE((nobody.workspace / "closed").stat().st_mode) == 0
    assert stat.S_IMODE((nobody.workspace / "wide").stat().st_mode) == 0o777
    (nobody.workspace / "closed").chmod(0o755)
    assert stat.S_IMODE((nobody.workspace / "closed/in").stat().st_mode) == 0o500
    assert stat.S_IMODE((nobody.workspace / "closed/in/a").stat().st_mode) == 0o755


AFTER_THE_LAST_MEMBER = {"no check sum", "wrong check sum", "garbage after", "endless padding"}


def broken_archives() -> dict[str, bytes]:
    whole = tar(member("a", content=os.urandom(100_000)), member("b", content=b"b"))
    packed = gzip.compress(whole)
    garbage = bytearray(whole)
    garbage[100_864 : 100_864 + 512] = b"\xff" * 512
    flipped = bytearray(packed)
    flipped[-6] ^= 1
    long_name = tarfile.TarInfo("././@LongLink")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 1 << 40
    return {
        "nothing": b"",
        "text": b"this is no gzip stream",
        "plain tar": whole,
        "gzip of nothing": gzip.compress(b""),
        "gzip of text": gzip.compress(b"hello " * 1000),
        "half a stream": packed[: len(packed) // 2],
        "no check sum": packed[:-4],
        "wrong check sum": bytes(flipped),
        "garbage after": packed + b"garbage",
        "half a tar": gzip.compress(whole[:50_000]),
        "no end mark": gzip.compress(whole[: 512 + 100_352]),
        "garbage header": gzip.compress(bytes(garbage)),
        "endless name": gzip.compress(long_name.tobuf() + b"x" * 100_000),
        "garbled record": gzip.compress(pax(b"99 path=evil\n")),
        "number of letters": gzip.compress(pax(b"11 size=ab\n") + tar(member("a"))),
        "infinite time": gzip.compress(pax(b"13 mtime=inf\n") + tar(member("a"))),
        "no time": gzip.compress(pax(b"13 mtime=nan\n") + tar(member("a"))),
        "endless padding": gzip.compress(whole + bytes(20 << 20), compresslevel=1),
        "negative size": gzip.compress(pax(b"11 size=-5\n") + tar(member("a"))),
    }


def pax(records: bytes) -> bytes:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    return info.tobuf(tarfile.USTAR_FORMAT) + records + b"\0" * (-len(records) % 512)


@pytest.mark.parametrize("name", broken_archives())
def test_what_is_no_whole_archive_is_invalid(slot: Slot, name: str) -> None:
    answer = slot.ask("route_archive_put", broken_archives()[name], path=".")
    assert answer.refused == ("invalid", None), answer.header
    assert "b" not in names_below(slot.workspace) or name in AFTER_THE_LAST_MEMBER


def test_gzip_in_members_with_padding_is_taken(slot: Slot) -> None:
    whole = tar(member("a", content=b"x" * 50_000))
    packed = gzip.compress(whole[:10_000]) + gzip.compress(whole[10_000:]) + b"\0" * 100_000
    assert slot.ask("route_archive_put", packed, path=".").header["ok"]
    assert (slot.workspace / "a").read_bytes() == b"x" * 50_000


def test_sparse_members_are_refused_by_name(slot: Slot) -> None:
    with open(slot.workspace / "holes", "wb") as file:
        file.truncate(10 << 20)
    for form in ("gnu", "posix"):
        made = subprocess.run(["tar", "czSf", "-", f"--format={form}", "-C", slot.workspace, "holes"], capture_output=True, check=True).stdout
        answer = slot.ask("route_archive_put", made, path="new")
        assert answer.refused == ("invalid", None)
        assert "holes" in answer.detail or "GNUSparse" in answer.detail


def test_a_bomb_is_streamed_and_ends_at_the_slots_limit(slot: Slot) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, 8 << 20))
        limit_memory(8 << 20)

    bomb = tgz(member("bomb", content=bytes(64 << 20)))  # eight times the memory, and eight times the longest file
    answer = slot.ask("route_archive_put", bomb, before=limited, path=".")
    assert answer.refused == ("file_error", "EFBIG")
    assert "bomb" in answer.detail
    assert names_below(slot.workspace) == []


def test_a_tree_that_changes_meanwhile_leaves_out_what_vanished(slot: Slot) -> None:
    for number in range(200):
        (slot.workspace / f"{number:03d}").write_bytes(os.urandom(20_000))
    out_r, out_w = os.pipe()
    pid = os.fork()
    if pid == 0:
        from sandbox_server.agent.inslot import child

        child.run_operation("route_archive_get", {"path": "."}, slot.ctx, out_w)
        os._exit(0)
    os.close(out_w)
    with open(out_r, "rb") as file:
        head = file.read(4)
        for number in range(100, 200):
            (slot.workspace / f"{number:03d}").unlink()
        body = file.read()[int.from_bytes(head, "big") :]
    assert os.waitpid(pid, 0)[1] == 0
    with tarfile.open(fileobj=io.BytesIO(body), mode="r:gz") as archive:
        names = archive.getnames()
    assert 100 <= len(names) < 200

from __future__ import annotations

import base64
import json
import os
import resource
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agent.inslot.asking import DEPTH, Slot, make_deep, names_below

ROUTES = ["route_get", "route_put", "route_list", "route_archive_get", "route_archive_put"]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def small(base: Path) -> Iterator[Slot]:
    """A slot on a file system of 1 MiB."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "small", str(base)], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield Slot(base)
    finally:
        subprocess.run(["umount", "-l", str(base)], check=True)


def test_a_file_goes_out_and_in(slot: Slot) -> None:
    data = os.urandom(1 << 20)
    assert slot.ask("route_put", data, path="a/b/c").header == {"ok": True, "size_bytes": 1 << 20}
    assert mode_of(slot.workspace / "a/b/c") == 0o644
    answer = slot.ask("route_get", path="a/b/c")
    assert answer.body == data
    assert {name: answer.header[name] for name in ("size_bytes", "mode")} == {"size_bytes": 1 << 20, "mode": "0644"}


def test_roots_are_reached_by_absolute_paths_too(slot: Slot) -> None:
    for path in (slot.tmp / "x", slot.workspace / "x"):
        slot.ask("route_put", b"y", path=str(path), mode=0o700)
        assert mode_of(path) == 0o700
        assert slot.ask("route_get", path=str(path)).body == b"y"


def test_a_put_replaces_what_is_there_in_one_step(slot: Slot) -> None:
    target = slot.workspace / "a"
    target.write_text("a longer old text")
    target.chmod(0o600)
    (slot.workspace / "link").symlink_to("a")
    with open(target) as old:
        slot.ask("route_put", b"new", path="link")
        assert old.read() == "a longer old text"
    assert (slot.workspace / "link").is_symlink()
    assert target.read_text() == "new"
    assert mode_of(target) == 0o644
    assert names_below(slot.workspace) == ["a", "link"]


def test_a_put_that_breaks_off_changes_nothing(slot: Slot) -> None:
    (slot.workspace / "a").write_text("old")
    answer = slot.ask("route_put", b"half", path="a", size_bytes=8)
    assert answer.refused == ("invalid", None)
    assert "8 bytes were announced" in answer.detail
    assert names_below(slot.workspace) == ["a"]
    assert (slot.workspace / "a").read_text() == "old"


@pytest.mark.parametrize("op", ROUTES)
def test_paths_that_lead_out_are_refused(slot: Slot, op: str) -> None:
    (slot.outside / "secret").write_text("secret")
    (slot.workspace / "link").symlink_to(slot.outside / "secret")
    (slot.workspace / "folder").symlink_to(slot.outside)
    (slot.workspace / "chain").symlink_to("folder")
    (slot.workspace / "dangling").symlink_to(slot.outside / "new")
    (slot.workspace / "up").symlink_to("../..")
    (slot.tmp / "in").mkdir()
    paths = [
        "/etc/passwd",
        "/",
        "..",
        "../outside/secret",
        "link",
        "folder/secret",
        "chain/secret",
        "dangling",
        "up",
        "folder/new/deep",
        "/no/such/place",
        "../tmpx",
    ]
    paths += [f"{slot.tmp}/in/../../outside/secret", f"{slot.workspace}x", "/proc/self/environ", "/proc/self/root/etc/passwd", "link/", "folder/../secret"]
    for path in paths:
        answer = slot.ask(op, b"x", path=path)
        assert answer.refused == ("path_outside", None), path
    assert names_below(slot.outside) == ["secret"]
    assert (slot.outside / "secret").read_text() == "secret"


def test_symlinks_that_stay_inside_are_followed(slot: Slot) -> None:
    (slot.tmp / "a").write_text("in tmp")
    (slot.workspace / "tmp").symlink_to(slot.tmp)
    (slot.workspace / "sub").mkdir()
    (slot.workspace / "sub/up").symlink_to("../tmp/a")
    assert slot.ask("route_get", path="sub/up").body == b"in tmp"
    slot.ask("route_put", b"new", path="tmp/new/file")
    assert (slot.tmp / "new/file").read_bytes() == b"new"


def test_what_is_no_file_is_a_file_error(slot: Slot) -> None:
    os.mkfifo(slot.workspace / "fifo")
    (slot.workspace / "to-fifo").symlink_to("fifo")
    (slot.workspace / "folder").mkdir()
    (slot.workspace / "file").touch()
    (slot.workspace / "loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(slot.workspace / "sock"))
        for op in ("route_get", "route_put"):
            assert slot.ask(op, b"x", path="fifo").refused == ("file_error", "EINVAL")
            assert slot.ask(op, b"x", path="to-fifo").refused == ("file_error", "EINVAL")
            assert slot.ask(op, b"x", path="sock").refused == ("file_error", "EINVAL")
            assert slot.ask(op, b"x", path="folder").refused == ("file_error", "EISDIR")
            assert slot.ask(op, b"x", path="file/below").refused == ("file_error", "ENOTDIR")
            assert slot.ask(op, b"x", path="loop").refused == ("file_error", "ELOOP")
            assert slot.ask(op, b"x", path=".").refused == ("file_error", "EISDIR")
    assert slot.ask("route_put", b"x", path="new/").refused == ("file_error", "EISDIR")
    for op in ("route_get", "route_list", "route_archive_get"):
        assert slot.ask(op, path="missing").refused == ("file_not_found", "ENOENT")
        assert slot.ask(op, path="missing/below").refused == ("file_not_found", "ENOENT")
    for op in ("route_list", "route_archive_put"):
        assert slot.ask(op, b"", path="file").refused == ("file_error", "ENOTDIR")
        assert slot.ask(op, b"", path="fifo").refused == ("file_error", "ENOTDIR")
    assert slot.ask("route_archive_get", path="fifo").refused == ("file_error", "EINVAL")


@pytest.mark.privileged
def test_a_device_is_a_file_error_and_is_never_opened(slot: Slot) -> None:
    os.mknod(slot.workspace / "zero", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    for op in ("route_get", "route_put", "route_archive_get"):
        assert slot.ask(op, b"x", path="zero").refused == ("file_error", "EINVAL")
    assert slot.ask("route_list", path=".").header["entries"][0]["type"] == "other"


def test_permissions_are_the_slots_own(nobody: Slot) -> None:
    (nobody.workspace / "root").mkdir()
    (nobody.workspace / "root/secret").write_text("x")
    (nobody.workspace / "root/secret").chmod(0)
    assert nobody.ask("route_get", path="root/secret").refused == ("file_error", "EACCES")
    (nobody.workspace / "root").chmod(0)
    assert nobody.ask("route_get", path="root/secret").refused == ("file_error", "EACCES")
    assert nobody.ask("route_put", b"x", path="root/new").refused == ("file_error", "EACCES")
    assert nobody.ask("route_list", path="root").refused == ("file_error", "EACCES")


def test_no_space_leaves_nothing_behind(small: Slot) -> None:
    (small.workspace / "a").write_text("old")
    for op, code in (("route_put", "file_error"), ("write_file", "tool_error")):
        args = {"content": "x" * (2 << 20)} if op == "write_file" else {}
        answer = small.ask(op, b"x" * (2 << 20), path="a", **args)
        assert answer.refused == (code, "ENOSPC")
        assert answer.detail == "no space left for a: remove something or write less"
    assert names_below(small.workspace) == ["a"]
    assert (small.workspace / "a").read_text() == "old"


def test_the_largest_file_is_a_file_error(slot: Slot) -> None:
    answer = slot.ask("route_put", b"x" * (2 << 20), before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)), path="a")
    assert answer.refused == ("file_error", "EFBIG")
    assert names_below(slot.workspace) == []


def test_a_put_whose_child_is_killed_leaves_nothing(slot: Slot) -> None:
    in_r, in_w = os.pipe()
    out_r, out_w = os.pipe()
    code = f"from sandbox_server.agent.inslot import child; child.run_operation('route_put', {{'path': 'a'}}, {slot.ctx!r}, {out_w}, {in_r})"
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(in_r, out_w))
    os.close(out_w)
    os.write(in_w, b"x" * 60_000)
    while not any(name.name.isdigit() and "workspace" in _target(name) for name in Path(f"/proc/{process.pid}/fd").iterdir()):
        assert process.poll() is None
    process.kill()
    process.wait()
    for fd in (in_r, in_w, out_r):
        os.close(fd)
    assert names_below(slot.workspace) == []


def _target(path: Path) -> str:
    try:
        return os.readlink(path)
    except FileNotFoundError:
        return ""


def test_a_listing_has_what_the_contract_says(slot: Slot) -> None:
    (slot.workspace / "folder").mkdir()
    (slot.workspace / "folder/file").write_text("four")
    os.utime(slot.workspace / "folder/file", (5.5, 5.5))
    (slot.workspace / "link").symlink_to("/etc/passwd")
    os.mkfifo(slot.workspace / "pipe")
    header = slot.ask("route_list", path=".", recursive=True).header
    entries = {entry["path"]: entry for entry in header["entries"]}
    assert [entry["type"] for entry in header["entries"]] == ["directory", "file", "symlink", "other"]
    assert entries[f"{slot.workspace}/folder/file"] == {
        "path": f"{slot.workspace}/folder/file",
        "type": "file",
        "size_bytes": 4,
        "mode": "0644",
        "mtime": 5.5,
    }
    assert (header["truncated"], header["unreadable"]) == (False, 0)
    assert len(slot.ask("route_list", path=".").header["entries"]) == 3
    assert slot.ask("route_list", path=".", max_entries=2).header["truncated"] is True


def test_a_listing_of_a_deep_tree_is_bounded_in_bytes(slot: Slot) -> None:
    make_deep(slot.workspace, "d" * 40)
    header = slot.ask("route_list", path=".", recursive=True).header
    assert header["truncated"] is True
    assert DEPTH / 2 < len(header["entries"]) < DEPTH
    assert len(json.dumps(header)) < 8 << 20


def test_names_that_are_not_utf8_stay_valid_json(slot: Slot) -> None:
    Path(os.fsdecode(os.fsencode(slot.workspace) + b"/caf\xe9\n")).write_text("x")
    (entry,) = slot.ask("route_list", path=".").header["entries"]
    assert entry["path"] == f"{slot.workspace}/caf\ufffd\n"
    assert base64.b64decode(entry["path_base64"]) == os.fsencode(slot.workspace) + b"/caf\xe9\n"
    assert slot.ask("route_get", path="caf\udce9\n").body == b"x"


def test_a_file_that_shrinks_breaks_the_answer_off(slot: Slot) -> None:
    path = slot.workspace / "a"
    with open(path, "wb") as file:
        file.truncate(64 << 20)
    out_r, out_w = os.pipe()
    code = f"from sandbox_server.agent.inslot import child; child.run_operation('route_get', {{'path': 'a'}}, {slot.ctx!r}, {out_w})"
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=(out_w,))
    os.close(out_w)
    with open(out_r, "rb") as answer:
        answer.read(1)
        os.truncate(path, 1 << 20)
        assert len(answer.read()) < 64 << 20
    assert process.wait() == 2


@pytest.mark.parametrize("op", ROUTES)
def test_bad_arguments_of_a_route_are_invalid(slot: Slot, op: str) -> None:
    assert slot.ask(op, b"", path="a\0b").refused == ("invalid", None)
    assert slot.ask(op, b"", path="a", colour="red").refused == ("invalid", None)

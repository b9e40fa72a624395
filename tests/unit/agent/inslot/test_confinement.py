"""What the operations are built from, where a whole operation would not meet the case."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_server.agent.inslot.confine import ConfinedPath, Refusal, is_inside, quote_path, refusal_for_os_error, resolve_symlinks
from sandbox_server.agent.inslot.walk import walk
from tests.unit.agent.inslot.asking import Slot, names_below


def test_a_path_is_followed_as_the_kernel_does(slot: Slot) -> None:
    top = slot.workspace
    (top / "a/b").mkdir(parents=True)
    (top / "link").symlink_to("a/b")
    (top / "file").touch()
    (top / "abs").symlink_to(top / "link/..")
    assert resolve_symlinks(f"{top}/link/../b") == f"{top}/a/b"
    assert resolve_symlinks(f"{top}/abs/b/.//") == f"{top}/a/b"
    assert resolve_symlinks(f"{top}/new/er") == f"{top}/new/er"
    assert resolve_symlinks("/..") == "/"
    for path, number in (("new/../a", errno.ENOENT), ("file/x", errno.ENOTDIR), ("file/..", errno.ENOTDIR), ("file/", errno.ENOTDIR)):
        with pytest.raises(OSError) as caught:
            resolve_symlinks(f"{top}/{path}")
        assert caught.value.errno == number


def test_a_chain_of_symlinks_ends_where_the_kernels_does(slot: Slot) -> None:
    (slot.workspace / "0").touch()
    for number in range(41):
        (slot.workspace / str(number + 1)).symlink_to(str(number))
    assert resolve_symlinks(f"{slot.workspace}/40").endswith("/0")
    with pytest.raises(OSError) as caught:
        resolve_symlinks(f"{slot.workspace}/41")
    assert caught.value.errno == errno.ELOOP


def test_inside_goes_by_whole_names() -> None:
    assert is_inside("/w", ["/w"])
    assert is_inside("/w/a", ["/t", "/w"])
    assert is_inside("/anything", ["/"])
    assert not is_inside("/wa", ["/w"])
    assert not is_inside("/", ["/w"])


def test_a_path_that_is_swapped_after_it_was_resolved_is_still_refused(slot: Slot) -> None:
    (slot.workspace / "a").mkdir()
    (slot.workspace / "a/secret").touch()
    (slot.outside / "secret").touch()
    place = ConfinedPath("a/secret", slot.ctx)
    (slot.workspace / "a").rename(slot.workspace / "b")
    (slot.workspace / "a").symlink_to(slot.outside)
    with pytest.raises(Refusal) as caught:
        place.open_regular()
    assert caught.value.code == "path_outside"
    with pytest.raises(NotADirectoryError):
        place.open_parent()


def test_a_folder_that_moves_under_a_walk_ends_it(slot: Slot) -> None:
    (slot.workspace / "a/b/c").mkdir(parents=True)
    top = os.open(slot.workspace, os.O_RDONLY)
    failed: list[str] = []
    entries = walk(top, True, lambda path, error: failed.append(path))
    assert [next(entries).path for _ in range(3)] == ["a", "a/b", "a/b/c"]
    (slot.workspace / "a/b").rename(slot.outside / "b")
    with pytest.raises(Refusal, match="was moved"):
        next(entries)
    os.close(top)


def test_a_walk_does_not_go_into_what_it_is_to_avoid(slot: Slot) -> None:
    (slot.workspace / "a/b").mkdir(parents=True)
    top = os.open(slot.workspace, os.O_RDONLY)
    found = walk(top, True, lambda path, error: None, avoid=frozenset({os.fstat(top).st_dev}))
    assert [entry.path for entry in found] == ["a"]
    os.close(top)


def no_nameless_files() -> None:
    os.O_TMPFILE = os.O_DIRECTORY


def no_links() -> None:
    def link(*args: object, **kwargs: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "no /proc")

    os.link = link


@pytest.mark.parametrize("kernel", [no_nameless_files, no_links])
def test_writing_is_atomic_on_lesser_kernels_too(slot: Slot, kernel: Callable[[], None]) -> None:
    data = os.urandom(300_000)
    (slot.workspace / "a").write_text("old")
    assert slot.ask("route_put", data, before=kernel, path="a", mode=0o600).header["ok"]
    assert (slot.workspace / "a").read_bytes() == data
    assert (slot.workspace / "a").stat().st_mode & 0o777 == 0o600
    assert slot.ask("route_put", data, before=kernel, path="a", size_bytes=1).refused == ("invalid", None)
    assert names_below(slot.workspace) == ["a"]


@pytest.mark.parametrize("name", ["plain", "größe", "with space", "100%", "%s%d"])
def test_printable_names_are_shown_as_they_are(name: str) -> None:
    assert quote_path(name) == name
    for number in (errno.ENOENT, errno.EIO):
        assert name in refusal_for_os_error(OSError(number, ""), name).detail


@pytest.mark.parametrize("raw", [b"a\nb", b"\xff", b"it's\t\\", "\u202eevil".encode(), b"\x1b[31m"])
def test_other_names_are_shown_the_way_bash_reads_them(base: Path, raw: bytes) -> None:
    shown = quote_path(os.fsdecode(raw))
    assert shown.isprintable()
    assert subprocess.run(["bash", "-c", f"printf %s {shown}"], capture_output=True, check=True).stdout == raw

"""A file route is never led out of the slot."""

from __future__ import annotations

import io
import tarfile

import httpx
import pytest

from tests.hostile.hostile_harness import HostileHarness


def get(harness: HostileHarness, lease: dict, route: str, path: str) -> httpx.Response:
    return harness.client.get(f"/v1/leases/{lease['lease_id']}/{route}", params={"path": path})


def put(harness: HostileHarness, lease: dict, route: str, path: str, content: bytes) -> httpx.Response:
    return harness.client.put(f"/v1/leases/{lease['lease_id']}/{route}", params={"path": path}, content=content)


OUTSIDE = [
    *("/etc/passwd", "../../etc/passwd", "/workspace/../etc/passwd", "link-to-etc/passwd", "link-to-passwd", "chain/passwd"),
    *("/proc/self/environ", "/proc/1/environ", "/usr/bin/env", "/"),
]


NEW_OUTSIDE = ["/etc/new", "../new", "link-to-tmp/../../etc/new", "link-to-etc/new", "/proc/self/oom_score_adj", "/usr/new", "dangling-out"]


@pytest.mark.parametrize("route", ["files", "files/list", "archive"])
def test_reading_outside_is_refused(harness: HostileHarness, route: str) -> None:
    lease = harness.acquire()
    assert harness.bash(lease, "ln -s /etc link-to-etc; ln -s /etc/passwd link-to-passwd; ln -s link-to-etc chain")["success"]

    for path in OUTSIDE:
        answer = get(harness, lease, route, path)
        assert answer.status_code == 422, (path, answer.status_code, answer.text[:200])
        assert answer.json()["code"] == "invalid_request", path
        assert "root:" not in answer.text, path


def test_writing_outside_is_refused(harness: HostileHarness) -> None:
    lease = harness.acquire()
    assert harness.bash(lease, "ln -s /etc link-to-etc; ln -s /tmp link-to-tmp; ln -s /etc/dangling dangling-out")["success"]

    for path in NEW_OUTSIDE:
        answer = put(harness, lease, "files", path, b"x")
        assert answer.status_code == 422, (path, answer.status_code, answer.text[:200])
        assert answer.json()["code"] == "invalid_request", path


def test_what_is_no_regular_file_is_a_file_error_and_nothing_blocks(harness: HostileHarness) -> None:
    lease = harness.acquire()
    bind = "python3 -c \"import socket; socket.socket(socket.AF_UNIX).bind('sock')\""
    assert harness.bash(lease, f"mkfifo fifo; mkdir folder; ln -s fifo to-fifo; {bind}; mkdir locked; touch locked/f; chmod 0 locked")["success"]

    for path in ("fifo", "to-fifo", "folder", "sock"):
        answer = get(harness, lease, "files", path)
        assert answer.status_code == 409, (path, answer.text)
        assert answer.json()["code"] == "file_error"
    assert get(harness, lease, "files", "locked/f").json()["code"] == "file_error"
    assert get(harness, lease, "files", "none").status_code == 404
    assert get(harness, lease, "files", "none").json()["code"] == "file_not_found"
    answer = put(harness, lease, "files", "folder", b"x")
    assert (answer.status_code, answer.json()["code"]) == (409, "file_error")


def test_a_link_inside_is_followed(harness: HostileHarness) -> None:
    lease = harness.acquire()
    assert harness.bash(lease, "mkdir d; echo hello > d/f; ln -s d/f inside; ln -s /tmp t; echo there > /tmp/x")["success"]

    assert get(harness, lease, "files", "inside").content == b"hello\n"
    assert get(harness, lease, "files", "t/x").content == b"there\n"


def archive(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode = kind, target, mode
    return info


EVIL = {
    "absolute": [(member("/etc/evil"), b"x")],
    "dot dot": [(member("../../etc/evil"), b"x")],
    "through a link": [(member("l", tarfile.SYMTYPE, "/etc"), b""), (member("l/evil"), b"x")],
    "hard link out": [(member("h", tarfile.LNKTYPE, "/etc/passwd"), b"")],
    "device": [(member("disk", tarfile.BLKTYPE), b"")],
}


def test_an_archive_cannot_lead_out(harness: HostileHarness) -> None:
    lease = harness.acquire()

    for kind, members in EVIL.items():
        folder = kind.replace(" ", "-")  # each of them meets an empty folder
        assert harness.bash(lease, f"mkdir {folder}")["success"]
        answer = put(harness, lease, "archive", folder, archive(*members))
        assert answer.status_code in (409, 422), (kind, answer.text)
        assert answer.json()["code"] in ("invalid_request", "file_error"), kind
        found = harness.bash(lease, f"ls /etc/evil etc/evil 2>/dev/null; cat {folder}/h 2>/dev/null | grep root:; find . -type b")
        assert found["output"] == "", (kind, found)


def test_what_is_no_archive_is_said(harness: HostileHarness) -> None:
    lease = harness.acquire()

    for content in (b"", b"not gzip", archive((member("f"), b"x" * 100_000))[:40]):
        answer = put(harness, lease, "archive", ".", content)
        assert answer.status_code == 422, answer.text
        assert answer.json()["code"] == "invalid_request"


def test_setuid_does_not_come_in_by_archive(harness: HostileHarness) -> None:
    lease = harness.acquire()

    assert put(harness, lease, "archive", ".", archive((member("tool", mode=0o4755), b"#!/bin/sh\n"))).status_code == 204

    assert harness.bash(lease, "stat -c %a tool")["output"] in ("755\n", "700\n", "644\n")

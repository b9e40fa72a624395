"""The file operations of the agent: streamed, confined to the slot, done inside the slot."""

from __future__ import annotations

import io
import tarfile

import pytest

from sandbox_server.agent import wire
from sandbox_server.link.errors import AgentRefused
from tests.integration.agent.agent_harness import AgentHarness


async def _put(harness: AgentHarness, op: str, path: str, content: bytes, piece_bytes: int = 60_000) -> dict[str, object]:
    async with harness.link.stream({"op": op, "slot": "0", "epoch": harness.epoch("0"), "path": path}) as stream:
        for start in range(0, len(content), piece_bytes):
            await stream.send_data(content[start : start + piece_bytes])
        stream.end()
        async for event in stream:
            if isinstance(event, wire.Ended):
                return event.meta
    raise AssertionError("the stream did not end")


async def test_a_file_can_be_written_and_read(harness: AgentHarness) -> None:
    content = bytes(range(256)) * 20_000
    await _put(harness, "file_put", "d/file.bin", content)

    assert (await harness.bash("wc -c < d/file.bin")).text == f"{len(content)}\n"
    data, _ = await harness.data("file_get", path="d/file.bin")
    assert data == content


async def test_the_flow_control_credit_of_many_small_pieces_is_returned(bwrap: AgentHarness) -> None:
    content = bytes(range(250)) * 600
    await _put(bwrap, "file_put", "file.bin", content, piece_bytes=5)

    data, _ = await bwrap.data("file_get", path="file.bin")
    assert data == content


async def test_a_folder_is_listed(bwrap: AgentHarness) -> None:
    await bwrap.bash("mkdir -p d/e; echo x > d/e/f; ln -s f d/e/link")
    async with bwrap.link.stream({"op": "file_list", "slot": "0", "epoch": bwrap.epoch("0"), "path": "d", "recursive": True}) as stream:
        items = [event.meta async for event in stream if isinstance(event, wire.Item)]

    assert {entry["path"].rsplit("/", 1)[-1]: entry["type"] for entry in items[0]["entries"]} == {"e": "directory", "f": "file", "link": "symlink"}


async def test_an_archive_can_be_written_and_read(harness: AgentHarness) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("project/main.py")
        info.size = 6
        archive.addfile(info, io.BytesIO(b"pass\n\n"))
    await _put(harness, "archive_put", ".", buffer.getvalue())
    data, _ = await harness.data("archive_get", path="project")

    assert (await harness.bash("cat project/main.py")).text == "pass\n\n"
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        assert any(name.endswith("main.py") for name in archive.getnames())


@pytest.mark.parametrize(
    ("make", "path", "code"),
    [
        ("true", "nowhere", "file_not_found"),
        ("mkdir folder", "folder", "file_error"),
        ("mkfifo pipe", "pipe", "file_error"),
        ("ln -s /etc/passwd out", "out", "path_outside"),
        ("ln -s /etc d", "d/passwd", "path_outside"),
        ("true", "../../etc/passwd", "path_outside"),
        ("true", "/etc/passwd", "path_outside"),
        ("true", "a\0b", "invalid"),
    ],
)
async def test_a_path_that_leaves_the_slot_is_refused(bwrap: AgentHarness, make: str, path: str, code: str) -> None:
    await bwrap.bash(make)
    with pytest.raises(AgentRefused) as refused:
        await bwrap.data("file_get", path=path)

    assert refused.value.code == code


async def test_an_incomplete_upload_is_not_put_in_place(harness: AgentHarness) -> None:
    async with harness.link.stream({"op": "file_put", "slot": "0", "epoch": harness.epoch("0"), "path": "half"}) as stream:
        await stream.send_data(b"x" * 100_000)

    await harness.until('[ -z "$(find . -mindepth 1)" ]')

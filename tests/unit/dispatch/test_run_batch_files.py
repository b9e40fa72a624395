"""The files of run-batches: programs on their way to slots, and results until they are read or for as long as they are kept."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.dispatch.run_batch.program_spool import WRITE_BYTES, ProgramSpool
from sandbox_server.dispatch.run_batch.result_log import SEGMENT_BYTES, ResultLog
from sandbox_server.dispatch.run_batch.shared_file import REST_FACTOR, SHORT_BYTES, ShortFileWork
from sandbox_server.dispatch.run_batch.values import Program, RunBatchRequest
from sandbox_server.store.output_files import FreeSpace

REQUEST = RunBatchRequest(tenant="alice", pool="default")


async def pieces(*parts: bytes) -> AsyncGenerator[bytes, None]:
    for part in parts:
        yield part


async def text_of(log: ResultLog, position: int) -> bytes:
    return b"".join([piece async for piece in log.read(log.lines[position])])


@pytest.mark.parametrize("size_bytes", [10, WRITE_BYTES])
async def test_programs_are_read_as_they_were_appended(tmp_path: Path, size_bytes: int) -> None:
    programs = [
        Program(tool="bash", args={"command": f"{index}"}, files={"data": bytes([index]) * size_bytes}, artifacts=("a",), timeout_s=1.5, allow_network=False)
        for index in range(5)
    ]
    spool = ProgramSpool(tmp_path / "folder", REQUEST)
    for program in programs:
        await spool.append(program)
    await spool.finish()

    assert [await spool.read(index) for index in (3, 0, 4, 1, 2)] == [programs[index] for index in (3, 0, 4, 1, 2)]
    assert list(tmp_path.rglob("*.*")) == []
    spool.close()


def test_work_on_files_is_done_in_the_event_loop_only_if_it_is_short_and_the_last_was_quick() -> None:
    now_s = 0.0
    work = ShortFileWork(lambda: now_s)

    def take_two_seconds() -> str:
        nonlocal now_s
        now_s += 2.0
        return "done"

    assert (work.is_allowed(SHORT_BYTES), work.is_allowed(SHORT_BYTES + 1)) == (True, False)
    assert work.run(take_two_seconds) == "done"
    now_s += 2.0 * REST_FACTOR - 0.1
    assert not work.is_allowed(1)
    now_s += 0.1
    assert work.is_allowed(1)


async def test_programs_leave_room_on_the_disk_for_the_state(tmp_path: Path) -> None:
    spool = ProgramSpool(tmp_path, REQUEST, FreeSpace(free_bytes=1 << 60, free_share=1.0))
    program = Program(tool="bash", args={"command": "true"}, files={"data": bytes(WRITE_BYTES)}, artifacts=(), timeout_s=None, allow_network=None)

    with pytest.raises(StorageUnavailable, match=r"No space left on device\. Nothing has run"):
        await spool.append(program)
    spool.close()


async def test_a_line_that_was_not_written_completely_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rb-1.ndjson"
    log = ResultLog(tmp_path, path)
    await log.open_kept()
    await log.append(3, pieces(b'{"index":3,', b'"x":1}'))
    await log.append(0, pieces(b'{"index":0,"x":2}'))
    log.close()
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"index":1,"x"')

    again = ResultLog(tmp_path, path)
    await again.open_kept()
    assert [line.index for line in again.lines] == [3, 0]
    assert [await text_of(again, position) for position in (0, 1)] == [b'{"index":3,"x":1}', b'{"index":0,"x":2}']
    await again.append(1, pieces(b'{"index":1,"x":3}'))
    again.close()
    assert path.read_bytes() == whole + b'{"index":1,"x":3}\n'


async def test_what_every_follower_has_read_is_deleted(tmp_path: Path) -> None:
    log = ResultLog(tmp_path, None)
    fast, slow = log.follow(reads_at_end=False), log.follow(reads_at_end=False)
    large = b"x" * SEGMENT_BYTES
    for index in range(3):
        await log.append(index, pieces(large))
    assert log.unread_bytes() == 3 * SEGMENT_BYTES

    log.advance(fast)
    assert log.unread_bytes() == 2 * SEGMENT_BYTES
    assert await text_of(log, 0) == large
    log.advance(slow)
    with pytest.raises(StorageUnavailable):
        await text_of(log, 0)
    assert await text_of(log, 1) == large
    log.close()


async def test_a_result_whose_writing_failed_leaves_no_line(tmp_path: Path) -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b'{"index":0,'
        raise OSError(5, "broken")

    log = ResultLog(tmp_path, tmp_path / "rb-2.ndjson")
    await log.open_kept()
    with pytest.raises(StorageUnavailable):
        await log.append(0, broken())
    await log.append(1, pieces(b'{"index":1,"x":1}'))

    assert [line.index for line in log.lines] == [1]
    assert await text_of(log, 0) == b'{"index":1,"x":1}'
    log.close()

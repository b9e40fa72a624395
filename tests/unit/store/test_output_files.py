"""Files of large outputs: each exists as long as the record of its call, and as long as a response is sent from it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox_server.core.errors import StorageUnavailable
from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.core.types import Lease, LeaseState
from sandbox_server.store.output_files import FreeSpace, OutputFiles, WrongSize
from sandbox_server.store.sqlite.store import SqliteStore
from tests.unit.dispatch.conftest import lease


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "outputs").iterdir())


async def recorded(store: SqliteStore, held: Lease) -> Result:
    store.put(held)
    file = await store.outputs.write_bytes(held.lease_id, [b"out", b"err"], 3)
    result = Result(call_id="c", lease_id=held.lease_id, reason=Reason.EXIT, fault=Fault.NONE, exit_code=0, output_file=file)
    store.record_result(held.lease_id, "c", b"id", result)
    await store.flush()
    return result


async def test_a_file_outlives_the_service_and_goes_with_its_lease(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "state.db")
    told = await recorded(store, lease("l-1", "0"))
    await store.close()

    again = SqliteStore(tmp_path / "state.db")
    recorded_result = again.find_result("l-1", "c")
    assert recorded_result is not None
    assert recorded_result.result == told
    again.put(replace(lease("l-1", "0"), state=LeaseState.RELEASED))
    assert len(names(tmp_path)) == 1, "it is still being sent"
    del recorded_result, told
    gc.collect()
    await again.close()
    assert names(tmp_path) == []


async def test_what_an_earlier_life_left_goes_where_nobody_holds_its_lease(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path / "outputs")
    await files.write_bytes("l-gone", [b"x"])
    files.close()
    assert len(names(tmp_path)) == 1

    await SqliteStore(tmp_path / "state.db").close()

    assert names(tmp_path) == []


async def test_an_output_of_another_size_leaves_nothing(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path / "outputs")

    async def chunks() -> AsyncIterator[bytes]:
        yield b"abc"

    for size in (2, 4):
        with pytest.raises(WrongSize):
            await files.write("l-1", chunks(), size)
    gc.collect()
    files.close()
    assert names(tmp_path) == []


async def test_room_on_the_disk_is_left_for_the_state(tmp_path: Path) -> None:
    files = OutputFiles(tmp_path / "outputs", FreeSpace(free_bytes=1 << 60, free_share=1.0))

    with pytest.raises(StorageUnavailable, match="No space left"):
        await files.write_bytes("l-1", [b"x"])
    files.close()


COLLECTED_WHILE_WRITING = """
import asyncio, gc, sys
from pathlib import Path
from sandbox_server.store.output_files import OutputFiles

async def main():
    files = OutputFiles(Path(sys.argv[1]))
    gc.set_threshold(1, 1, 1)
    for number in range(300):
        cycle = [await files.write_bytes("l-1", [b"x"])]
        cycle.append(cycle)
        files.delete_when_unused(cycle[0])
    files.close()

asyncio.run(main())
"""


def test_the_garbage_collector_may_find_an_unused_file_at_any_moment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", COLLECTED_WHILE_WRITING, tmp_path / "outputs"], timeout=60, check=True)

    assert list((tmp_path / "outputs").iterdir()) == []

"""The files of a slot: refusals of the agent become the errors of the HTTP contract."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from sandbox_server.core.errors import BackendUnavailable, FileError, FileNotFound, InvalidRequest, LeaseLost, PoolServiceError, SandboxLost
from sandbox_server.dispatch.files import SlotFiles
from tests.unit.dispatch.conftest import DispatchHarness


async def pieces(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


async def whole(chunks: AsyncIterator[bytes]) -> bytes:
    return b"".join([chunk async for chunk in chunks])


async def test_a_file_goes_in_and_comes_out_larger_than_any_window(harness: DispatchHarness) -> None:
    files = SlotFiles(harness.slot_locator)
    parts = [bytes([n]) * 100_000 for n in range(40)]

    await files.write_file("alice", "a", "big", 0o600, pieces(*parts))

    assert await whole(files.read_file("alice", "a", "big")) == b"".join(parts)


@pytest.mark.parametrize(("path", "error"), [("missing", FileNotFound), ("fifo", FileError), ("../out", InvalidRequest)])
async def test_refusals_are_the_contracts_errors(harness: DispatchHarness, path: str, error: type[PoolServiceError]) -> None:
    with pytest.raises(error):
        await whole(SlotFiles(harness.slot_locator).read_file("alice", "a", path))


async def test_a_slot_that_has_moved_on_is_a_lost_lease(harness: DispatchHarness) -> None:
    harness.agent.slots["0"].epoch = 2
    stale = harness.slot_locator.locations["a"]
    harness.slot_locator.errors["a"] = LeaseLost("a was released")

    class Late(type(harness.slot_locator)):  # type: ignore[misc]
        asked = 0

        def locate_slot(self, tenant: str, lease_id: str) -> object:
            self.asked += 1
            return stale if self.asked == 1 else super().locate_slot(tenant, lease_id)

    with pytest.raises(LeaseLost, match="a was released"):
        await whole(SlotFiles(Late(harness.slot_locator.locations, harness.slot_locator.errors)).read_file("alice", "a", "x"))


@pytest.mark.parametrize(("lost", "error"), [(SandboxLost("it burnt down"), SandboxLost), (None, BackendUnavailable)])
async def test_a_lost_link_is_a_lost_sandbox_or_an_unreachable_one(harness: DispatchHarness, lost: SandboxLost | None, error: type[PoolServiceError]) -> None:
    harness.slot_locator.lost = lost
    harness.slot_locator.locations["a"].agent.link._end_connection("pulled")

    with pytest.raises(error):
        await whole(SlotFiles(harness.slot_locator).read_file("alice", "a", "x"))


async def test_a_caller_that_stops_sending_leaves_nothing(harness: DispatchHarness) -> None:
    async def half() -> AsyncIterator[bytes]:
        yield b"x" * 1000
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        await SlotFiles(harness.slot_locator).write_file("alice", "a", "half", None, half())

    assert harness.agent.files == {}

"""Tests of `RemoteToolBackend` with a real service."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile

from env_client import RemoteToolBackend
from tests.support.service import Service


def backend(service: Service, **options: str) -> RemoteToolBackend:
    return RemoteToolBackend(service.url, service.token, acquire_timeout_s=30, **options)  # type: ignore[arg-type]


async def test_trajectories_work_side_by_side(service: Service) -> None:
    async with backend(service, run_id="r-backend") as held:
        one = await held.acquire("t-1")
        two, three = await held.acquire_group(["t-2", "t-3"])
        slots = (one, two, three)
        written = await held.execute_batch([(slot, "write_file", {"path": "who", "content": slot.trajectory_id or ""}) for slot in slots])
        read = await held.execute_batch([(slot, "bash", {"command": "cat who; exit 3"}) for slot in slots])
        late = await held.execute(one, "bash", {"command": "sleep 30"}, timeout_s=0.2)
        unknown = await held.execute(one, "no_such_tool", {})
        assert {info.trajectory_id for info in [info async for info in held.client.iter_leases(run_id="r-backend")]} == {"t-1", "t-2", "t-3"}

    assert all(result.success for result in written)
    assert [(result.success, result.output, result.metadata["exit_code"], result.fault) for result in read] == [
        (False, f"t-{number}", 3, "none") for number in (1, 2, 3)
    ]
    assert (late.reason, late.fault) == ("timeout", "policy")
    assert (unknown.reason, unknown.fault) == ("invalid_args", "policy")


async def test_all_slots_of_a_run_come_back_at_the_end(service: Service) -> None:
    async with backend(service, run_id="r-forgets") as held:
        await held.acquire("t-1")
    async with backend(service) as other:
        assert [info async for info in other.client.iter_leases(run_id="r-forgets")] == []


async def test_a_released_slot_is_lost_and_says_so(service: Service) -> None:
    async with backend(service) as held:
        slot = await held.acquire("t-1")
        await held.release(slot)
        result = await held.execute(slot, "bash", {"command": "ls"})
        await held.release(slot)

    assert (result.success, result.reason, result.fault) == (False, "lease_lost", "ambiguous")


async def test_files_are_kept_for_the_run(service: Service) -> None:
    async with backend(service) as held:
        slot = await held.acquire("t-1")
        await held.execute(slot, "write_file", {"path": "kept", "content": "x"})
        await held.release(slot, reset_workspace=False)
        async with asyncio.timeout(30):
            while not (await held.client.pool("default")).slots["kept"]:  # the slot is kept once its processes have ended; no event reports that
                await asyncio.sleep(0.02)
        again = await held.acquire("t-2")

        assert again.info.workspace_kept
        assert await held.read_artifact(again, "kept") == b"x"


async def test_artifacts(service: Service) -> None:
    async with backend(service) as held:
        slot = await held.acquire("t-1")
        await held.execute(slot, "bash", {"command": "mkdir -p out; echo hello > out/a"})
        entries = await held.list_artifacts(slot, "out", recursive=True)
        packed = await held.archive_artifacts(slot, "out")
        streamed = b"".join([chunk async for chunk in held.stream_artifacts(slot, "out")])

    assert [entry.path for entry in entries] == ["/workspace/out/a"]
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        assert archive.getnames() == ["a"]
    assert gzip.decompress(streamed) == gzip.decompress(packed)


async def test_the_network_goes_after_set_up(service: Service) -> None:
    async with backend(service) as held:
        slot = await held.acquire("t-1")
        await held.narrow(slot, allow_network=False)
        result = await held.execute(slot, "bash", {"command": "tail -n +3 /proc/net/dev | cut -d: -f1"})

    assert not slot.info.allow_network
    assert result.output.split() == ["lo"]


async def test_entries_of_the_workspace_become_read_only(service: Service) -> None:
    async with backend(service) as held:
        slot = await held.acquire("t-1")
        await held.execute(slot, "bash", {"command": "mkdir tests; echo kept > tests/a"})
        assert slot.info.read_only == ()
        await held.narrow(slot, read_only=["tests"])
        result = await held.execute(slot, "bash", {"command": "echo forged > tests/a; cat tests/a"})
        written = await held.execute(slot, "write_file", {"path": "tests/a", "content": "forged"})

        assert slot.info.read_only == ["tests"]
        assert result.output.splitlines()[-1] == "kept"
        assert "tests/a is read-only here" in written.error

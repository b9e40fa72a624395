"""Which records of other agents are believed: only the files of this user alone that were written under exactly the same facts."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import resource
import signal
import stat
from pathlib import Path
from typing import Any

import pytest

from sandbox_server.agent.isolation.probing import records
from sandbox_server.agent.isolation.probing.records import FoundRecord, ProbeRecords, make_content, may_be_reused
from sandbox_server.agent.kernel import uids

FACTS = {"kernel": {"boot_id": "one"}, "programs": {"/usr/bin/bwrap": [1, 2, 3]}}
EXPECTED = make_content("uid", FACTS)
GENUINE = FoundRecord(stat.S_IFREG | 0o600, 0, 1, EXPECTED)


def test_a_record_of_this_user_under_the_same_facts_is_believed() -> None:
    assert may_be_reused(GENUINE, EXPECTED, 0)


@pytest.mark.parametrize(
    "change",
    [
        {"uid": 1000},
        {"mode": stat.S_IFREG | 0o620},
        {"mode": stat.S_IFREG | 0o604},
        {"mode": stat.S_IFIFO | 0o600},
        {"links": 2},
        {"content": b""},
        {"content": EXPECTED[:-1]},
        {"content": EXPECTED + b" "},
        {"content": make_content("bwrap", FACTS)},
        {"content": make_content("uid", {**FACTS, "kernel": {"boot_id": "another"}})},
        {"content": make_content("uid", {**FACTS, "programs": {"/usr/bin/bwrap": [1, 2, 4]}})},
    ],
    ids=str,
)
def test_any_other_file_is_not_believed(change: dict[str, Any]) -> None:
    assert not may_be_reused(dataclasses.replace(GENUINE, **change), EXPECTED, 0)


async def _proves(found: ProbeRecords, mode: str = "uid", keeps: bool = False) -> bool:
    async with found.open_record(mode) as record:
        proves = record.proves_mode()
        if keeps:
            record.keep_proof()
    return proves


async def test_a_proof_is_kept_for_the_same_mode_and_facts_only(tmp_path: Path) -> None:
    found = ProbeRecords(str(tmp_path), FACTS)

    assert not await _proves(found, keeps=True)
    assert await _proves(found)
    assert not await _proves(found, "bwrap")
    assert not await _proves(ProbeRecords(str(tmp_path), {**FACTS, "system": "another"}))
    assert not await _proves(ProbeRecords(None, FACTS))


async def test_a_probe_that_failed_leaves_nothing_that_is_believed(tmp_path: Path) -> None:
    found = ProbeRecords(str(tmp_path), FACTS)
    with pytest.raises(OSError, match="the probe failed"):
        async with found.open_record("uid"):
            raise OSError("the probe failed")

    assert not await _proves(found)


async def test_a_full_file_system_keeps_no_agent_from_starting(tmp_path: Path) -> None:
    found = ProbeRecords(str(tmp_path), FACTS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size_bytes in (0, 10):  # Nothing can be written, or a part.
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, limits[1]))
            assert not await _proves(found, keeps=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, ignored)

    assert [path.stat().st_size for path in tmp_path.iterdir()] == [10]
    assert not await _proves(found)


async def test_agents_that_start_together_wait_for_the_one_that_probes(tmp_path: Path) -> None:
    probing = asyncio.Event()

    async def probe() -> bool:
        async with ProbeRecords(str(tmp_path), FACTS).open_record("uid") as record:
            if record.proves_mode():
                return True
            probing.set()
            await asyncio.sleep(0)
            record.keep_proof()
            return False

    assert sorted(await asyncio.gather(*(probe() for _ in range(4)))) == [False, True, True, True]


async def test_an_agent_whose_record_stays_locked_probes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "WAIT_S", 0.02)
    found = ProbeRecords(str(tmp_path), FACTS)
    async with found.open_record("uid") as first:
        first.keep_proof()
        assert not await _proves(found, keeps=True)


async def test_a_link_in_the_place_of_a_record_is_neither_believed_nor_written_to(tmp_path: Path) -> None:
    found = ProbeRecords(str(tmp_path / "records"), FACTS)
    (tmp_path / "records").mkdir()
    await _proves(found, keeps=True)
    (record,) = (tmp_path / "records").iterdir()
    target = record.rename(tmp_path / "elsewhere")
    target.write_bytes(EXPECTED)
    record.symlink_to(target)

    assert not await _proves(found, keeps=True)
    record.unlink()
    record.hardlink_to(target)
    assert not await _proves(found)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create files of another user")
def test_a_folder_that_another_user_can_change_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = [tmp_path / name for name in ("planted", "open", "good")]
    for parent in parents:
        (parent / "records").mkdir(parents=True, mode=0o700)
    os.chown(parents[0] / "records", 1000, 1000)
    (parents[1] / "records").chmod(0o722)
    monkeypatch.setattr(uids, "LOCK_DIRS", [str(parent) for parent in parents])

    assert uids.find_run_folder("records") == str(parents[2] / "records")


def test_old_records_are_removed(tmp_path: Path) -> None:
    for number in range(records._MAX_RECORDS + 1):
        (tmp_path / str(number)).write_bytes(b"")
        os.utime(tmp_path / str(number), (number, number))
    records._remove_old_records(str(tmp_path))

    left = {path.name for path in tmp_path.iterdir()}
    assert str(records._MAX_RECORDS) in left
    assert "0" not in left
    assert len(left) == records._MAX_RECORDS // 2

"""What is kept of an output: a bounded part in memory, all of it in the spool, and a cut version for the result."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sandbox_server.agent.execution.output import FINISHED_MEMORY_TOTAL_BYTES, SINK_MEMORY_BYTES, Sink, Spool, truncation_marker

CHUNKS = st.lists(st.integers(0, 40_000), max_size=12)


def _fill(sink: Sink, sizes: list[int]) -> bytes:
    whole = b""
    for turn, size in enumerate(sizes):
        chunk = bytes([65 + turn % 26]) * size
        sink.write(chunk)
        whole += chunk
    return whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(sizes=CHUNKS, limit=st.integers(0, 100_000), budget=st.integers(0, 200_000))
def test_a_cut_output_has_the_beginning_and_the_end_whatever_the_spool_holds(tmp_path: Path, sizes: list[int], limit: int, budget: int) -> None:
    sink = Sink(Spool(str(tmp_path / os.urandom(4).hex()), budget), limit)
    whole = _fill(sink, sizes)
    kept = sink.finish_output()

    assert kept.total_bytes == len(whole)
    assert kept.is_truncated == (len(whole) > limit)
    if len(whole) <= limit:
        assert kept.read_for_result() == whole
    else:
        head, tail = whole[: limit // 2], whole[len(whole) - (limit - limit // 2) :]
        first, _, last = kept.read_for_result().partition(truncation_marker(len(whole) - limit))
        if kept.available_bytes >= len(head):
            assert (first, last) == (head, tail)
    assert whole.startswith(kept.read(0, kept.available_bytes))


def test_the_memory_for_an_output_does_not_grow_with_the_output(tmp_path: Path) -> None:
    sink = Sink(Spool(str(tmp_path), 1 << 30), 1000)
    for _ in range(100):
        sink.write(b"x" * 100_000)

    assert len(sink._memory) + len(sink._tail) <= SINK_MEMORY_BYTES
    assert sink.available_bytes == 10_000_000
    assert sink.read(9_999_999, 10) == b"x"


def test_the_oldest_finished_output_is_deleted_to_make_room(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), 300_000)
    kept = []
    for _ in range(4):
        sink = Sink(spool, 100)
        sink.write(b"x" * 100_000)
        kept.append(sink.finish_output())

    assert [entry.is_evicted for entry in kept] == [True, False, False, False]
    assert kept[0].read_for_result() == truncation_marker(100_000)
    assert len(list(tmp_path.iterdir())) == 3


def test_many_small_outputs_leave_memory_and_stay_readable(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path), 1 << 30)
    kept = []
    for number in range(FINISHED_MEMORY_TOTAL_BYTES // 4000 + 10):
        sink = Sink(spool, 50_000)
        sink.write(b"%04d" % number * 1000)
        kept.append(sink.finish_output())

    assert kept[0].memory == b""
    assert kept[0].read_for_result() == b"0000" * 1000
    assert kept[-1].memory != b""


def test_a_full_disk_cuts_the_output_and_the_result_reports_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(28, "No space left on device")

    sink = Sink(Spool(str(tmp_path), 1 << 30), 1000)
    monkeypatch.setattr(os, "pwrite", full)
    sink.write(b"a" * 50_000)
    sink.write(b"b" * 50_000)
    kept = sink.finish_output()

    assert kept.total_bytes == 100_000
    assert kept.read_for_result().endswith(b"b" * 500)


@pytest.mark.parametrize("refuses", ["open", "pwrite"])
def test_without_room_for_a_file_only_the_middle_of_an_output_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    spool = Spool(str(tmp_path), 1 << 30)
    monkeypatch.setattr(os, refuses, full)
    small, large = Sink(spool, 50_000), Sink(spool, 1000)
    small.write(b"s" * 10_000)
    for letter in (b"a", b"b", b"c"):
        large.write(letter * 60_000)

    assert small.finish_output().read_for_result() == b"s" * 10_000
    assert large.read(0, 2) == b"aa"
    assert large.finish_output().read_for_result() == b"a" * 500 + truncation_marker(179_000) + b"c" * 500
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []


def test_without_a_disk_outputs_stay_in_memory_up_to_a_limit_and_the_newest_always_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    spool = Spool(str(tmp_path), 1 << 30)
    monkeypatch.setattr(os, "open", full)
    kept = []
    for _ in range(3):
        sink = Sink(spool, FINISHED_MEMORY_TOTAL_BYTES)
        sink.write(b"x" * FINISHED_MEMORY_TOTAL_BYTES)
        kept.append(sink.finish_output())

    assert [len(entry.memory) + len(entry.tail) for entry in kept] == [0, 0, FINISHED_MEMORY_TOTAL_BYTES]
    assert [entry.is_evicted for entry in kept] == [True, True, False]

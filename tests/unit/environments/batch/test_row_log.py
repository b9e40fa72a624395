"""A row is in the file whole or not at all: after a kill in the middle of it, and on a disk that is full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from environments.batch.failures import RunRefused, WriteFailed
from environments.batch.files.row_log import RowLog, read_rows, repair_last_line
from tests.support.small_disk import fill_disk, mounted_disk


def test_rows_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    for number in range(2):
        with RowLog(path) as log:
            log.append({"n": number, "text": "ü\u2028\n"})
            log.sync()

    assert list(read_rows(path)) == [{"n": 0, "text": "ü\u2028\n"}, {"n": 1, "text": "ü\u2028\n"}]
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_is_deleted_or_replaced_stops_the_run(tmp_path: Path, is_replaced: bool) -> None:
    path = tmp_path / "rows.jsonl"
    with RowLog(path) as log:
        log.append({"n": 1})
        log.sync()
        path.rename(tmp_path / "rows.jsonl.1")
        if is_replaced:
            path.write_text("")
        with pytest.raises(WriteFailed, match=r"rows\.jsonl (was replaced|cannot be written)"):
            log.sync()


def test_half_a_surrogate_pair_does_not_make_the_file_unreadable(tmp_path: Path) -> None:
    with RowLog(tmp_path / "rows.jsonl") as log:
        log.append({"text": "a\ud800b"})

    assert list(read_rows(tmp_path / "rows.jsonl")) == [{"text": "a?b"}]


def test_a_kill_at_any_byte_of_the_last_row_loses_at_most_that_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    first, second = json.dumps({"n": 1}).encode() + b"\n", json.dumps({"n": 2, "text": "x"}).encode() + b"\n"
    for written in range(len(second) + 1):
        path.write_bytes(first + second[:written])

        removed_bytes = repair_last_line(path)

        is_whole = written >= len(second) - 1  # only the newline is missing
        assert list(read_rows(path)) == [{"n": 1}, {"n": 2, "text": "x"}][: 1 + is_whole]
        assert removed_bytes == (0 if is_whole else written)
        assert path.read_bytes().endswith(b"\n")
        with RowLog(path) as log:
            log.append({"n": 3})
        assert list(read_rows(path))[-1] == {"n": 3}


def test_a_long_torn_row_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n{"text": "' + b"x" * 300_000)

    assert repair_last_line(path) == 300_000 + 10
    assert list(read_rows(path)) == [{"n": 1}]


def test_missing_and_empty_files_need_no_repair(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()

    assert (repair_last_line(tmp_path / "missing"), repair_last_line(tmp_path / "empty")) == (0, 0)
    assert (list(read_rows(tmp_path / "missing")), list(read_rows(tmp_path / "empty"))) == ([], [])


@pytest.mark.parametrize("line", [b"edited", b"[" * 200_000], ids=["text", "nested"])
def test_a_line_in_the_middle_that_is_no_row_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "rows.jsonl").write_bytes(b'{"n": 1}\n' + line + b'\n{"n": 2}\n')

    with pytest.raises(RunRefused, match="line 2 of"):
        list(read_rows(tmp_path / "rows.jsonl"))


@pytest.mark.privileged
def test_on_a_full_disk_the_file_ends_with_the_last_whole_row(tmp_path: Path) -> None:
    with mounted_disk(tmp_path / "disk", "1m") as disk, RowLog(disk / "rows.jsonl") as log:
        log.append({"n": 1})
        fill_disk(disk)
        with pytest.raises(WriteFailed, match="No space left on device"):
            log.append({"n": 2, "text": "x" * 100_000})
        assert list(read_rows(disk / "rows.jsonl")) == [{"n": 1}]

        (disk / "fill").unlink()
        log.append({"n": 3})
        assert list(read_rows(disk / "rows.jsonl")) == [{"n": 1}, {"n": 3}]

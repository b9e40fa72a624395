"""The file of a recording: complete at any moment, and limited in size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandbox_server.agent.execution.output import Spool
from sandbox_server.agent.execution.tmux.recording import Recording


def lines_of(recording: Recording) -> list[Any]:
    assert recording.path is not None
    return [json.loads(line) for line in Path(recording.path).read_bytes().splitlines()]


def test_a_recording_has_a_header_and_events_with_their_times(tmp_path: Path) -> None:
    times = iter([1000.5, 1000.75, 1000.0, 1003.0, 1004.0, 1005.0])
    recording = Recording(Spool(str(tmp_path / "spool"), 1 << 20), clock=lambda: next(times))

    recording.start_terminal(80, 24)
    recording.record_output(b"\xc3")
    recording.record_output(b"\xa9\xff")
    recording.record_size(100, 30)
    recording.close_file()
    recording.start_terminal(80, 24)

    header, *events = lines_of(recording)
    assert header == {"version": 2, "width": 80, "height": 24, "timestamp": 1000, "env": {"TERM": "screen-256color", "SHELL": "/bin/bash"}}
    assert events == [[0.25, "o", "é\ufffd"], [0.25, "r", "100x30"], [2.5, "r", "80x24"], [3.5, "o", "\x1bc"]]


def test_a_recording_that_is_too_long_says_where_it_ends(tmp_path: Path) -> None:
    recording = Recording(Spool(str(tmp_path / "spool"), 1 << 20), limit_bytes=3000)
    recording.start_terminal(80, 24)

    for _ in range(10):
        recording.record_output(b"x" * 500)

    assert "limit of 3000 bytes" in recording.end_reason
    assert lines_of(recording)[-1][2] == "\r\n[The recording ends here: it has reached its limit of 3000 bytes.]\r\n"
    assert sum(event[2] == "x" * 500 for event in lines_of(recording)[1:]) == 3


def test_a_full_spool_ends_a_recording_and_nothing_else(tmp_path: Path) -> None:
    recording = Recording(Spool(str(tmp_path / "spool"), 300))
    recording.start_terminal(80, 24)

    recording.record_output(b"x" * 200)
    recording.record_output(b"y")

    assert len(lines_of(recording)) == 1
    assert "spool of the lease is full" in recording.end_reason


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("in the way")
    recording = Recording(Spool(str(tmp_path / "spool"), 1 << 20))

    recording.start_terminal(80, 24)
    recording.record_output(b"x")

    assert recording.path is None
    assert "could not be written" in recording.end_reason


@pytest.mark.parametrize("data", [b"\x1b]0;title\x07", b'"\\\n\x00', "e\u0301\U0001f600\u2028".encode()])
def test_every_character_comes_back(tmp_path: Path, data: bytes) -> None:
    recording = Recording(Spool(str(tmp_path / "spool"), 1 << 20))
    recording.start_terminal(80, 24)
    recording.record_output(data)

    assert lines_of(recording)[1][2] == data.decode()

"""Which lines a capture has, and what is sent to tmux as keys."""

from __future__ import annotations

import dataclasses

import pytest

from sandbox_server.agent.errors import InvalidArgs
from sandbox_server.agent.execution.tmux.availability import check_version
from sandbox_server.agent.execution.tmux.control_mode import ControlModeError
from sandbox_server.agent.execution.tmux.keys import send_keys_command
from sandbox_server.agent.execution.tmux.screen import HISTORY_LINES, CaptureRange, OutputPosition, PaneState, parse_state
from sandbox_server.agent.execution.tmux.settling import TerminalActivity, is_settled

STATE = PaneState(100, 24, 80, 2, 10, False, False, "/dev/pts/3", None)


def test_the_state_of_a_pane_is_parsed_strictly() -> None:
    assert parse_state([b"100 24 80 2 10 0 0 17 /dev/pts/3 xy"]) == STATE
    assert parse_state([b"0 24 80 2 10 1 1 17 /dev/pts/3 xy9"]).exit_code == 137
    for lines in ([], [b"100 24 80 2 10 0 0 17 /etc/passwd xy"], [b"-1 24 80 2 10 0 0 17 /dev/pts/3 xy"], [b"a", b"b"]):
        with pytest.raises(ControlModeError):
            parse_state(lines)


def test_the_lines_of_a_capture_are_known_beforehand() -> None:
    assert CaptureRange().count_lines(STATE) == 24
    assert CaptureRange(None).count_lines(STATE) == 124
    assert CaptureRange(-3, 10).count_lines(STATE) == 14
    assert CaptureRange(-1000, 10).count_lines(STATE) == 111, "tmux begins with the first line that it has"


def test_what_is_new_begins_where_the_cursor_was() -> None:
    position = OutputPosition()
    assert position.find_new_range(STATE) is None, "nothing was shown yet"
    position.mark_shown(STATE)
    position.count_printed(b"a\nb\n")

    assert position.find_new_range(dataclasses.replace(STATE, history_lines=102)) == CaptureRange(8, 10)
    assert position.find_new_range(dataclasses.replace(STATE, history_lines=0, cursor_y=0)) is None, "the screen was cleared"
    assert position.find_new_range(dataclasses.replace(STATE, is_alternate=True)) is None
    position.count_printed(b"\n" * HISTORY_LINES)
    assert position.find_new_range(dataclasses.replace(STATE, history_lines=HISTORY_LINES)) is None, "lines may have been dropped"


def test_no_key_can_become_a_command() -> None:
    assert send_keys_command(b"%0", [b"ls -l", b"Enter"]) == b'send-keys -t %0 -- "ls \\055l" "Enter"'
    assert send_keys_command(b"%0", ['"; kill-server\n$x é'.encode()]) == b'send-keys -t %0 -- "\\042\\073 kill\\055server\\012\\044x \\303\\251"'


@pytest.mark.parametrize("version", ["tmux 3.2", "tmux 3.3a", "tmux 10.0", "tmux next-3.6"])
def test_newer_versions_of_tmux_are_accepted(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize(("version", "named"), [("", "not on the PATH"), ("tmux 3.1c", "tmux 3.1c"), ("not tmux", "not tmux")])
def test_a_missing_or_old_tmux_is_named(version: str, named: str) -> None:
    with pytest.raises(InvalidArgs, match=f"{named}.*apt-get install tmux"):
        check_version(version)


@pytest.mark.parametrize(
    ("activity", "settled"),
    [
        (TerminalActivity(quiet_s=0.3, has_printed=True, reads_keys=True, cursor_x=0), True),
        (TerminalActivity(quiet_s=0.1, has_printed=True, reads_keys=True, cursor_x=0), False),
        (TerminalActivity(quiet_s=0.3, has_printed=False, reads_keys=True, cursor_x=0), False),
        (TerminalActivity(quiet_s=60, has_printed=True, reads_keys=False, cursor_x=0), False),
        (TerminalActivity(quiet_s=0.3, has_printed=True, reads_keys=False, cursor_x=6), False),
        (TerminalActivity(quiet_s=1.1, has_printed=True, reads_keys=False, cursor_x=6), True),
    ],
)
def test_a_program_has_settled_when_it_waits_for_keys(activity: TerminalActivity, settled: bool) -> None:
    assert is_settled(activity) is settled

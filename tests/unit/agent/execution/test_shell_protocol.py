"""Tests of what the agent and the shell of a session say to each other."""

from __future__ import annotations

import pytest

from sandbox_server.agent.execution.sessions.shell_protocol import MAX_MESSAGE_BYTES, needs_check, parse_reports


@pytest.mark.parametrize(
    ("data", "reports", "bad_count", "rest"),
    [
        (b"1 0\n", [(1, 0)], 0, b""),
        (b"1 0\n2 255\n3", [(1, 0), (2, 255)], 0, b"3"),
        (b"1 256\n", [], 1, b""),
        (b"x\n-1 0\n1 0 \n\n7 7\n", [(7, 7)], 4, b""),
        (b"\xff" * (MAX_MESSAGE_BYTES + 1), [], 1, b""),
        (b"1234567890 0\n", [], 1, b""),
        (b"", [], 0, b""),
    ],
)
def test_only_reports_are_read_and_the_rest_is_bounded(data: bytes, reports: list[tuple[int, int]], bad_count: int, rest: bytes) -> None:
    assert parse_reports(data) == (reports, bad_count, rest)


def test_what_could_run_in_part_or_harm_the_shell_is_checked_first() -> None:
    assert all(map(needs_check, (b"echo a\nif true", b"echo $(", b"echo `", b"cat <(", b"tee >(")))
    assert not any(map(needs_check, (b"true", b"echo 'a", b"cd x && make\n", b"echo $HOME ${x}")))

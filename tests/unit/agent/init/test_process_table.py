"""Which processes belong together, from a table of them."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from sandbox_server.agent.init.process_table import find_trees, read_process_table, select_living, send_signal

# pid -> parent, session, start, state
TABLE = {
    1: (0, 1, 0, b"S"),
    10: (1, 10, 5, b"S"),  # a run
    11: (10, 10, 6, b"S"),
    12: (11, 12, 7, b"S"),  # in a session of its own
    13: (1, 12, 8, b"S"),  # an orphan of that session
    14: (13, 14, 9, b"Z"),
    20: (1, 20, 5, b"S"),  # another run
    21: (20, 20, 6, b"S"),
}


def test_descendants_their_sessions_and_what_comes_of_those() -> None:
    assert find_trees(TABLE, [10]) == {10, 11, 12, 13, 14}
    assert find_trees(TABLE, [20]) == {20, 21}
    assert find_trees(TABLE, []) == set()


def test_the_dead_are_not_counted() -> None:
    assert select_living(TABLE, [13, 14, 99]) == {13: 8}


def test_a_leader_that_has_ended_before_its_session_is_no_error() -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", "import subprocess; print(subprocess.Popen(['sleep', '60'], stdout=2).pid)"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert leader.stdout is not None
    with leader.stdout:
        member = int(leader.stdout.readline())
        leader.wait()
    try:
        send_signal({leader.pid: 0}, 9)
        assert read_process_table()[member][1] == leader.pid
    finally:
        send_signal({member: read_process_table()[member][2]}, 9)


# Sends a signal under a system call filter with which pidfd_open (call 434 on every machine) answers as older kernels do for a leader that was reaped.
AS_OLDER_KERNELS = """
import errno, struct
from sandbox_server.agent.init.privileges import confine_process
from sandbox_server.agent.init.process_table import send_signal
instructions = ((0x20, 0, 0, 0), (0x15, 0, 1, 434), (0x06, 0, 0, 0x50000 | errno.EINVAL), (0x06, 0, 0, 0x7FFF0000))
confine_process(b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions), is_shared=True)
send_signal({1 << 22: 0}, 9)
"""


def test_a_leader_that_older_kernels_call_invalid_is_no_error() -> None:
    sent = subprocess.run([sys.executable, "-c", AS_OLDER_KERNELS], capture_output=True, text=True, check=False)
    assert sent.returncode == 0, sent.stderr


def test_a_signal_that_does_not_exist_is_an_error() -> None:
    own = os.getpid()
    with pytest.raises(OSError, match=os.strerror(errno.EINVAL)):
        send_signal({own: read_process_table()[own][2]}, 1000)

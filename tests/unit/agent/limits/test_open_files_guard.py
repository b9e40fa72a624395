"""Which slot is ended when the machine's table of open files is nearly full, and who is to blame."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sandbox_server.agent.limits.open_files_guard import FileTable, choose_slot, count_descriptors, read_file_table


@pytest.mark.parametrize(
    ("counts", "chosen"),
    [
        ({}, None),
        ({1: 50, 2: 20}, None),  # other programs have filled it
        ({1: 500, 2: 400}, (1, False)),
        ({1: 30, 2: 850}, (2, True)),
        ({1: 70, 2: 850}, (2, False)),  # it might not have filled it without the other one
    ],
)
def test_the_slot_with_most_descriptors_is_ended(counts: dict[int, int], chosen: tuple[int, bool] | None) -> None:
    assert choose_slot(counts, FileTable(900, 1000)) == chosen


def test_the_table_of_the_machine_is_read() -> None:
    table = read_file_table()

    assert 0 < table.open_count < table.most
    assert not table.is_nearly_full
    assert read_file_table(table.open_count).is_nearly_full


def test_the_descriptors_of_a_whole_tree_are_counted() -> None:
    program = "import os, sys; files = [os.open('/dev/null', os.O_RDONLY) for _ in range(70)]; os.fork(); os.write(1, b'up\\n'); os.read(0, 1)"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"up\n"] * 2
        counted = count_descriptors([process.pid, os.getpid()])
        process.stdin.close()

    assert 140 <= counted[process.pid] < 300

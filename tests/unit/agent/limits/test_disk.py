"""When a disk counts as full, which slot goes, and how much a slot takes, whatever it does to be overlooked."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from sandbox_server.agent.kernel.memory_plan import MIB
from sandbox_server.agent.kernel.trash import delete_tree
from sandbox_server.agent.limits.disk_plan import Reserve, Space, choose_slot_to_end, compute_reserve
from sandbox_server.agent.limits.disk_usage import DiskMeter, DiskUsage, measure_disk

GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("use", "others", "alone"),
    [
        ((75, 10), [], True),
        ((200, 10), [(4, 10), (4, 10)], True),  # less than a sixteenth of what must stay free: they have not filled it
        ((200, 10), [(50, 10)], True),
        ((200, 10), [(80, 10)], False),
        ((74, 10), [], False),  # others than the slots have filled it
        ((200, 10), [(30, 10), (30, 10)], False),
    ],
)
def test_a_slot_fills_a_disk_alone_where_it_would_be_full_though_the_others_had_nothing(
    use: tuple[int, int], others: list[tuple[int, int]], alone: bool
) -> None:
    in_bytes = [(size * MIB, files) for size, files in (use, *others)]

    assert Reserve(75 * MIB, 50).is_exceeded_by(in_bytes[0], in_bytes[1:], Space(300 * MIB, 20 * MIB, 1000, 900)) is alone


@pytest.mark.parametrize(("files", "others_files", "alone"), [(900, 2, True), (900, 100, False), (40, 0, False)])
def test_a_slot_fills_a_disk_alone_with_files(files: int, others_files: int, alone: bool) -> None:
    assert Reserve(75 * MIB, 50).is_exceeded_by((0, files), [(0, others_files)], Space(300 * MIB, 200 * MIB, 1000, 20)) is alone


def test_a_disk_without_a_limit_of_files_is_not_filled_with_files() -> None:
    assert not Reserve(75 * MIB, 0).is_exceeded_by((10, 1000), [], Space(300 * MIB, 20 * MIB, 0, 0))


@pytest.mark.parametrize(("size", "reserve"), [(1000 * GIB, 50 * GIB), (20 * GIB, 2 * GIB), (64 * MIB, 16 * MIB)])
def test_what_must_stay_free(size: int, reserve: int) -> None:
    assert compute_reserve(Space(size, 0, 1000, 0), None) == Reserve(reserve, 50)
    assert compute_reserve(Space(size, 0, 0, 0), 7 * MIB) == Reserve(7 * MIB, 0)


def test_the_slot_that_takes_most_goes_by_bytes_or_by_files() -> None:
    reserve, uses = Reserve(1600, 160), [("bytes", 500, 5), ("files", 400, 90)]

    assert choose_slot_to_end(uses, Space(10_000, 100, 1000, 900), reserve) == "bytes"
    assert choose_slot_to_end(uses, Space(10_000, 9000, 1000, 10), reserve) == "files"


def test_no_slot_goes_whose_end_would_not_help() -> None:
    assert choose_slot_to_end([("small", 99, 1)], Space(10_000, 0, 0, 0), Reserve(1600, 0)) is None
    assert choose_slot_to_end([("bytes", 9999, 1)], Space(10_000, 9000, 1000, 10), Reserve(1600, 160)) is None


def _measured(folder: Path, *, within_s: float = 20.0) -> DiskUsage:
    return measure_disk([str(folder)], os.getpid(), time.monotonic() + within_s, lambda: False)


def test_links_lead_nowhere_and_hard_links_count_once(tmp_path: Path) -> None:
    slot, outside = tmp_path / "slot", tmp_path / "outside"
    for folder in (slot, outside):
        folder.mkdir()
    (outside / "large").write_bytes(b"x" * (4 * MIB))
    (slot / "to-folder").symlink_to(outside)
    (slot / "to-file").symlink_to(outside / "large")
    (slot / "one").write_bytes(b"x" * MIB)
    for number in range(5):
        os.link(slot / "one", slot / f"again-{number}")

    use = _measured(slot)

    assert MIB <= use.size_bytes < 2 * MIB
    assert use.is_whole


def test_what_lies_deeper_than_there_are_descriptors_is_counted(tmp_path: Path) -> None:
    slot = tmp_path / "slot"
    slot.mkdir()
    script = "import os\nfor _ in range(1100):\n    os.mkdir('d'); os.chdir('d')\nopen('large', 'wb').write(b'x' * (3 << 20))"
    subprocess.run([sys.executable, "-c", script], cwd=slot, check=True)
    descriptors = len(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        use = _measured(slot)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    assert use.size_bytes >= 3 * MIB
    assert use.is_whole
    assert len(os.listdir("/proc/self/fd")) == descriptors
    delete_tree(str(slot))  # deeper than pytest's own deleting goes


def test_a_file_without_a_name_is_counted_while_it_is_open(tmp_path: Path) -> None:
    with (tmp_path / "gone").open("wb") as file:
        file.write(b"x" * (2 * MIB))
        file.flush()
        (tmp_path / "gone").unlink()
        assert _measured(tmp_path).size_bytes >= 2 * MIB
    assert _measured(tmp_path).size_bytes < MIB


def test_the_look_ends_in_time_and_says_that_it_did_not_see_all(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).mkdir()

    assert not _measured(tmp_path, within_s=-1).is_whole


def test_a_slot_that_moves_folders_leads_the_look_nowhere_else(tmp_path: Path) -> None:
    slot, outside = tmp_path / "slot", tmp_path / "outside"
    (slot / "a" / "b").mkdir(parents=True)
    outside.mkdir()
    (outside / "large").write_bytes(b"x" * (8 * MIB))
    over = threading.Event()

    def move() -> None:
        while not over.is_set():
            (slot / "a" / "b").rename(outside / "b")
            (outside / "b").rename(slot / "a" / "b")

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(300):
            meter = DiskMeter(time.monotonic() + 20, lambda: False)
            meter.add_tree(str(slot))
            assert meter.use.size_bytes < MIB
    finally:
        over.set()
        mover.join()

"""Only one service uses a state folder, even after its lock file was deleted or another folder was put in its place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_server.state_dir import LOCK_FILE, SERVER_FILE, StateDir, StateDirError
from tests.support.small_disk import fill_disk, mounted_disk

SECOND = "import sys; from pathlib import Path; from sandbox_server.state_dir import StateDir; StateDir.open(Path(sys.argv[1]))"


@pytest.fixture
def state_dir(tmp_path: Path) -> Iterator[StateDir]:
    opened = StateDir.open(tmp_path / "state")
    yield opened
    opened.unlock()


def start_second(path: Path) -> str:
    """Open the folder in another process. Returns its standard error, which is empty if it could."""
    return subprocess.run([sys.executable, "-c", SECOND, str(path)], capture_output=True, text=True, check=False).stderr


def test_a_second_service_is_told_who_has_the_folder(state_dir: StateDir) -> None:
    assert f"another service (pid {os.getpid()}) uses it" in start_second(state_dir.path)
    assert state_dir.check_lock() is None


def test_a_lock_file_that_was_deleted_lets_nobody_in_and_is_made_again(state_dir: StateDir) -> None:
    (state_dir.path / LOCK_FILE).unlink()

    assert "another service (pid unknown) uses it" in start_second(state_dir.path)
    assert state_dir.check_lock() is None
    assert f"another service (pid {os.getpid()}) uses it" in start_second(state_dir.path)


def test_another_folder_in_its_place_is_said(state_dir: StateDir, tmp_path: Path) -> None:
    state_dir.path.rename(tmp_path / "aside")
    assert "does not exist any more" in str(state_dir.check_lock())

    assert start_second(state_dir.path) == ""
    assert "was replaced by another folder" in str(state_dir.check_lock())
    state_dir.retry_server_file()
    assert not (state_dir.path / SERVER_FILE).exists()


def test_an_older_service_that_has_the_new_lock_file_is_said(state_dir: StateDir) -> None:
    """An older service locks the file only, and not the folder."""
    (state_dir.path / LOCK_FILE).unlink()
    older = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); f.write('7'); f.flush(); print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", older, str(state_dir.path / LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert "another service (pid 7) uses it: stop one of the two" in str(state_dir.check_lock())
        process.stdin.close()
    assert state_dir.check_lock() is None


def test_a_folder_is_free_again_when_its_service_has_closed_it(tmp_path: Path) -> None:
    StateDir.open(tmp_path / "state").unlock()
    assert start_second(tmp_path / "state") == ""


@pytest.mark.privileged
def test_a_full_disk_keeps_no_service_from_a_folder_that_it_had(full_disk: Path) -> None:
    first = StateDir.open(full_disk / "state")
    token, owner = first.token(), first.owner()
    first.unlock()
    fill_disk(full_disk)

    second = StateDir.open(full_disk / "state")
    try:
        assert (second.token(), second.owner()) == (token, owner)
        assert f"(pid {os.getpid()})" in start_second(full_disk / "state")
        second.write_server_file("http://here")
        assert not (full_disk / "state" / SERVER_FILE).exists()
        (full_disk / "fill").unlink()
        second.retry_server_file()
        assert json.loads((full_disk / "state" / SERVER_FILE).read_text())["url"] == "http://here"
    finally:
        second.unlock()
    assert not (full_disk / "state" / SERVER_FILE).exists()


@pytest.mark.privileged
def test_a_first_start_on_a_full_disk_says_so(full_disk: Path) -> None:
    (full_disk / "state").mkdir()
    opened = StateDir.open(full_disk / "state")
    fill_disk(full_disk)
    try:
        with pytest.raises(StateDirError, match="No space left"):
            opened.owner()
    finally:
        opened.unlock()


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB, which `fill_disk` fills."""
    with mounted_disk(tmp_path / "disk", "1m") as folder:
        yield folder

"""Init refuses to serve a slot whose read-only entries are not in force."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from sandbox_server.agent.init.read_only_mounts import check_read_only


def test_an_entry_that_is_not_mounted_read_only_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    info = (tmp_path / "tests").stat()

    with pytest.raises(OSError, match="'tests' of the workspace is not mounted read-only") as error:
        check_read_only(str(tmp_path), [("tests", info.st_dev, info.st_ino)])
    assert error.value.errno == errno.EPERM


def test_an_entry_that_was_replaced_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    info = (tmp_path / "tests").stat()

    with pytest.raises(OSError, match="'tests' of the workspace was replaced"):
        check_read_only(str(tmp_path), [("tests", info.st_dev, info.st_ino + 1)])


def test_an_entry_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        check_read_only(str(tmp_path), [("tests", 0, 0)])

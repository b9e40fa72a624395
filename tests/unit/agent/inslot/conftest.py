from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.agent.inslot.asking import NOBODY, Slot


@pytest.fixture
def base() -> Iterator[Path]:
    """A folder that any user can reach, unlike pytest's own, and whose removal survives trees deeper than a path may be."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    _remove(folder)


@pytest.fixture
def slot(base: Path) -> Slot:
    return Slot(base)


@pytest.fixture
def nobody(base: Path) -> Slot:
    """A slot whose operations run as a user that root's rights do not shine through; a test that is not run by root is one already."""
    return Slot(base, NOBODY if os.geteuid() == 0 else None)


def _remove(folder: Path) -> None:
    """Move what is too deep up to the top, level by level, until the tree is flat."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    number = 0
    try:
        while True:
            names = os.listdir(fd)
            if not names:
                break
            for name in names:
                try:
                    os.unlink(name, dir_fd=fd)
                except IsADirectoryError:
                    os.chmod(name, 0o700, dir_fd=fd)
                    inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
                    for below in os.listdir(inner):
                        number += 1
                        if stat.S_ISDIR(os.stat(below, dir_fd=inner, follow_symlinks=False).st_mode):
                            os.chmod(below, 0o700, dir_fd=inner)  # a folder that moves has its `..` rewritten
                        os.rename(below, f"{number:08d}.moved", src_dir_fd=inner, dst_dir_fd=fd)
                    os.close(inner)
                    os.rmdir(name, dir_fd=fd)
    finally:
        os.close(fd)
    folder.rmdir()

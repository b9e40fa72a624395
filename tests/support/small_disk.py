"""A small file system, which a test can fill."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def mounted_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system in memory for the duration of the block; skip the test where that is not possible.

    Args:
        folder: where it is mounted; created if it is missing.
        size: its size, as mount(8) writes it, such as `8m`.
    """
    if os.geteuid() != 0:
        pytest.skip("needs root, to mount a small file system")
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def fill_disk(folder: Path) -> None:
    """Write a file named `fill` until the file system has no room left. Deleting the file frees it again."""
    with contextlib.suppress(OSError), open(folder / "fill", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass

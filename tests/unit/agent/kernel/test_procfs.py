"""A folder that can be reached by a second path is found: through a read-only mount on the first one, it could be changed through the second."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox_server.agent.kernel.procfs import find_other_path

FIND = "from sandbox_server.agent.kernel.procfs import find_other_path; print(find_other_path(%r))"


def _find_with_mounts(commands: str, path: Path) -> str:
    """What is found in a mount namespace of its own, after these commands of a shell."""
    script = f'set -e; {commands}; exec "$0" -c "$1"'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, sys.executable, FIND % str(path)], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_folder_with_one_path_has_no_other(tmp_path: Path) -> None:
    assert find_other_path(str(tmp_path)) is None


@pytest.mark.privileged
def test_a_second_mount_is_found(tmp_path: Path) -> None:
    top, other = tmp_path / "data" / "top", tmp_path / "with blank"
    (top / "below").mkdir(parents=True)
    other.mkdir()

    assert _find_with_mounts(f"mount --bind '{tmp_path}/data' '{other}'", top) == f"{other}/top"
    assert _find_with_mounts(f"mount --bind '{top}/below' '{other}'", top) == str(other)
    assert _find_with_mounts(f"mount --bind '{tmp_path}/data' '{other}'; mount -t tmpfs none '{other}'", top) == "None", "another mount hides it"
    assert _find_with_mounts(f"mount --bind '{top}' '{top}'", top) == "None"

"""The processor quota of the control groups around a process, in folders that look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox_server.agent.kernel.cgroup_mounts import find_smallest_quota


def write_group(folder: Path, **files: str) -> None:
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)


@pytest.mark.parametrize(
    ("outer", "inner", "quota"),
    [
        ({"cpu_max": "150000 100000\n"}, {"cpu_max": "max 100000\n"}, 1.5),
        ({"cpu_max": "150000 100000\n"}, {"cpu_max": "50000 100000\n"}, 0.5),
        ({}, {"cpu_cfs_quota_us": "200000\n", "cpu_cfs_period_us": "50000\n"}, 4.0),
        ({"cpu_cfs_quota_us": "-1\n", "cpu_cfs_period_us": "100000\n"}, {"cpu_max": "max 100000\n"}, None),
        ({}, {}, None),
    ],
)
def test_the_smallest_quota_around_a_process_counts(tmp_path: Path, outer: dict[str, str], inner: dict[str, str], quota: float | None) -> None:
    write_group(tmp_path / "unit", **outer)
    write_group(tmp_path / "unit" / "job", **inner)

    assert find_smallest_quota(str(tmp_path), "/unit/job") == quota


def test_a_container_that_does_not_show_its_own_path_has_the_quota_of_the_mount(tmp_path: Path) -> None:
    write_group(tmp_path, cpu_max="300000 100000\n")

    assert find_smallest_quota(str(tmp_path), "/docker/0123") == 3.0

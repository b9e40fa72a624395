"""Measuring the size of a cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.slots.cache_usage import MAX_DEPTH, measure_cache
from sandbox_server.agent.slots.caches import check_cache_key

QUOTA_BYTES = 1 << 20


def _going_on() -> bool:
    return False


def test_the_sizes_of_a_tree_are_added_up(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(100_000))
    usage = measure_cache(str(tmp_path), QUOTA_BYTES, _going_on)

    assert usage.entries == 3
    assert 100_000 <= usage.size_bytes < 200_000
    assert usage.excess is None


def test_holes_do_not_count_and_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "sparse").touch()
    os.truncate(tmp_path / "sparse", 1 << 30)
    (tmp_path / "link").symlink_to("/usr")

    assert measure_cache(str(tmp_path), QUOTA_BYTES, _going_on).excess is None


def test_an_exceeded_quota_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(QUOTA_BYTES + 4096))

    assert measure_cache(str(tmp_path), QUOTA_BYTES, _going_on).excess == "it takes more than 1048576 bytes"


def test_a_tree_that_is_too_deep_is_reported(tmp_path: Path) -> None:
    (tmp_path / "/".join(["d"] * (MAX_DEPTH + 1))).mkdir(parents=True)

    assert "folders deep" in str(measure_cache(str(tmp_path), QUOTA_BYTES, _going_on).excess)


def test_a_folder_without_read_permission_is_measured(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    (tmp_path / "closed" / "file").write_bytes(bytes(QUOTA_BYTES + 4096))
    (tmp_path / "closed").chmod(0)

    assert measure_cache(str(tmp_path), QUOTA_BYTES, _going_on).excess is not None


def test_the_measurement_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    assert measure_cache(str(tmp_path), QUOTA_BYTES, lambda: True).entries == 0


@pytest.mark.parametrize("key", ["", "a/b", "..", "a" * 65, "a\n", "é", None, 7])
def test_invalid_keys_are_refused(key: object) -> None:
    with pytest.raises(Refused):
        check_cache_key(key)


def test_valid_keys_are_accepted() -> None:
    assert check_cache_key("aZ0_-") == "aZ0_-"

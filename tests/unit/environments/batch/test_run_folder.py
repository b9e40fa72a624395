"""The folder of a run: who may use it, and with which settings."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest

from environments.batch.failures import RunRefused, WriteFailed
from environments.batch.files.run_folder import EarlierRows, open_run_folder, replace_json
from environments.batch.settings import BatchSettings, Duplicates, changed_settings, stored_settings
from tests.support.small_disk import fill_disk, mounted_disk


@pytest.fixture
def settings(tmp_path: Path) -> BatchSettings:
    return BatchSettings(dataset_file=tmp_path / "prompts.jsonl", run_name="run", batch_size=10, model="m", base_url="http://x/v1", api_key="secret")


@pytest.mark.parametrize("name", ["a/b", "/tmp/x", "..", ".", "", "a b", "-x", ".hidden", "x" * 101, "a\n", "ü"])
def test_a_run_name_is_the_name_of_one_folder(tmp_path: Path, settings: BatchSettings, name: str) -> None:
    with pytest.raises(RunRefused, match="--run_name"):
        open_run_folder(dataclasses.replace(settings, run_name=name), resume=False, data_folder=tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_a_run_that_exists_is_only_resumed(tmp_path: Path, settings: BatchSettings) -> None:
    with open_run_folder(settings, resume=False, data_folder=tmp_path) as folder:
        run_id = folder.run_id
        assert folder.is_new
    with pytest.raises(RunRefused, match="exists already"):
        open_run_folder(settings, resume=False, data_folder=tmp_path)
    with open_run_folder(settings, resume=True, data_folder=tmp_path) as folder:
        assert (folder.run_id, folder.is_new) == (run_id, False)


def test_a_run_that_was_killed_before_its_first_byte_is_resumed(tmp_path: Path, settings: BatchSettings) -> None:
    with open_run_folder(settings, resume=True, data_folder=tmp_path) as folder:
        assert folder.is_new
    (folder.path / "checkpoint.json").unlink()
    with open_run_folder(settings, resume=True, data_folder=tmp_path) as folder:
        assert folder.is_new


def test_two_processes_cannot_use_one_folder(tmp_path: Path, settings: BatchSettings) -> None:
    with open_run_folder(settings, resume=False, data_folder=tmp_path), pytest.raises(RunRefused, match=r"another process \(\d+\) works on the run"):
        open_run_folder(settings, resume=True, data_folder=tmp_path)
    open_run_folder(settings, resume=True, data_folder=tmp_path).close()


def test_changed_settings_are_refused_with_both_values(tmp_path: Path, settings: BatchSettings) -> None:
    open_run_folder(settings, resume=False, data_folder=tmp_path).close()
    changed = dataclasses.replace(settings, model="other", max_turns=3, duplicates=Duplicates.MERGE, num_workers=99, batch_size=1, base_url="http://y")

    with pytest.raises(RunRefused) as refused:
        open_run_folder(changed, resume=True, data_folder=tmp_path)

    assert "--model was 'm' and is now 'other'" in refused.value.sentence
    assert "--max_turns was 30 and is now 3" in refused.value.sentence
    assert "--duplicates was 'keep' and is now 'merge'" in refused.value.sentence
    assert not any(name in refused.value.sentence for name in ("num_workers", "batch_size", "base_url"))
    # Settings that do not change what the rows contain may differ.
    open_run_folder(dataclasses.replace(settings, num_workers=99, base_url="http://y"), resume=True, data_folder=tmp_path).close()


def test_every_compared_setting_survives_the_checkpoint(settings: BatchSettings) -> None:
    stored = json.loads(json.dumps(stored_settings(settings)))

    assert changed_settings(stored, settings) == []
    assert "secret" not in json.dumps(stored)
    assert len(changed_settings({}, settings)) == sum(value is not None for value in stored.values())


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"format": 1, "run_id": "x"}', b'{"format": 2, "run_id": "x", "settings": {}}', b"\xff"])
def test_a_checkpoint_that_cannot_be_used_is_refused(tmp_path: Path, settings: BatchSettings, content: bytes) -> None:
    open_run_folder(settings, resume=False, data_folder=tmp_path).close()
    (tmp_path / "run" / "checkpoint.json").write_bytes(content)

    with pytest.raises(RunRefused, match=r"checkpoint\.json"):
        open_run_folder(settings, resume=True, data_folder=tmp_path)


def test_rows_without_a_checkpoint_are_not_mixed_with_others(tmp_path: Path, settings: BatchSettings) -> None:
    open_run_folder(settings, resume=False, data_folder=tmp_path).close()
    (tmp_path / "run" / "checkpoint.json").unlink()
    (tmp_path / "run" / "trajectories.jsonl").write_text("{}\n")

    with pytest.raises(RunRefused, match="is missing"):
        open_run_folder(settings, resume=True, data_folder=tmp_path)


def test_a_row_of_something_else_is_named(tmp_path: Path, settings: BatchSettings) -> None:
    with open_run_folder(settings, resume=False, data_folder=tmp_path) as folder:
        folder.trajectories_path.write_text('{"prompt_id": "00", "occurrence": 0}\n{"other": 1}\n')
        counted: list[object] = []
        with pytest.raises(RunRefused, match=r"line 2 of .* is not a trajectory"):
            folder.load_earlier_rows(counted.append)
        assert len(counted) == 1


def test_earlier_rows_are_known_by_hash_and_occurrence(tmp_path: Path, settings: BatchSettings) -> None:
    with open_run_folder(settings, resume=False, data_folder=tmp_path) as folder:
        folder.trajectories_path.write_text('{"prompt_id": "0a", "occurrence": 1}\n{"prompt_id": "0a", "occ')
        earlier = folder.load_earlier_rows(lambda row: None)

    assert (earlier.has(("0a", 1)), earlier.has(("0a", 0)), earlier.has(("0b", 1))) == (True, False, False)
    assert earlier.removed_bytes == len('{"prompt_id": "0a", "occ')
    assert not EarlierRows().has(("0a", 1))


def test_a_run_that_could_not_begin_leaves_no_folder(tmp_path: Path, settings: BatchSettings) -> None:
    with open_run_folder(settings, resume=False, data_folder=tmp_path) as folder:
        folder.discard()
    assert list(tmp_path.iterdir()) == []

    with open_run_folder(settings, resume=False, data_folder=tmp_path) as folder:
        folder.trajectories_path.touch()
        folder.discard()
        assert folder.path.exists()


@pytest.mark.privileged
def test_a_full_disk_keeps_the_earlier_checkpoint(tmp_path: Path, settings: BatchSettings) -> None:
    with mounted_disk(tmp_path / "disk", "1m") as disk:
        replace_json(disk / "checkpoint.json", {"n": 1})
        fill_disk(disk)
        with pytest.raises(WriteFailed, match="No space left"):
            replace_json(disk / "checkpoint.json", {"n": 2, "text": "x" * 100_000})
        assert json.loads((disk / "checkpoint.json").read_bytes()) == {"n": 1}
        assert [path.name for path in disk.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("name", ["checkpoint.json", "trajectories.jsonl", "errors.jsonl", "statistics.json", "lock", ".checkpoint.json.new"])
def test_a_named_pipe_is_refused_by_name(tmp_path: Path, settings: BatchSettings, name: str) -> None:
    open_run_folder(settings, resume=False, data_folder=tmp_path).close()
    (tmp_path / "run" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "run" / name)

    with pytest.raises(RunRefused, match=f"{name} is not a regular file"):
        open_run_folder(settings, resume=True, data_folder=tmp_path)


@pytest.mark.privileged
def test_a_folder_of_another_user_has_a_warning_and_no_links(tmp_path: Path, settings: BatchSettings, caplog: pytest.LogCaptureFixture) -> None:
    open_run_folder(settings, resume=False, data_folder=tmp_path).close()
    os.chown(tmp_path / "run", 12345, -1)
    open_run_folder(settings, resume=True, data_folder=tmp_path).close()
    assert "belongs to another user (uid 12345)" in caplog.text

    (tmp_path / "run" / "trajectories.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunRefused, match="is a link in a folder of another user"):
        open_run_folder(settings, resume=True, data_folder=tmp_path)

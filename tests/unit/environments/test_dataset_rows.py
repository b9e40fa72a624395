"""Tests of the rows of data sets: files, folders, rows that cannot be read, and data sets that cannot be opened."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from environments.dataset_rows import DatasetError, UnusableRow, load_rows, refuse_row_image


def write_lines(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


def test_json_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", '{"x": 1}', "", '{"x": "\\u00e9"}')
    rows = load_rows(str(path))
    assert len(rows) == 2
    assert [rows[0], rows[-1]] == [{"x": 1}, {"x": "é"}]
    assert rows[:1] == [{"x": 1}]
    with pytest.raises(IndexError, match="there is no row 2"):
        rows.read(2)


def test_an_unreadable_row_is_named_by_its_line_and_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_lines(tmp_path / "a.jsonl", '{"x": 1}', "", '{"x": ', "[1]", '{"x": 2}')
    with path.open("ab") as file:
        file.write(b'{"x": "\xff"}\n')
    rows = load_rows(str(path))
    with pytest.raises(UnusableRow, match=r"a\.jsonl, line 3 cannot be read"):
        rows.read(1)
    with pytest.raises(UnusableRow, match=r"a\.jsonl, line 4 is not an object with columns, but list"):
        rows.read(2)
    with caplog.at_level(logging.WARNING):
        assert list(rows) == [{"x": 1}, {"x": 2}]
    assert [record.getMessage().split(", ")[1].split()[1] for record in caplog.records] == ["3", "4", "6"]


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.table({"x": list(range(10)), "tests": [["a", "b"]] * 10}), path, row_group_size=4)
    rows = load_rows(str(path))
    assert [rows[number] for number in (0, 4, 9)] == [{"x": number, "tests": ["a", "b"]} for number in (0, 4, 9)]
    assert rows.name(4).endswith("a.parquet, row 4")


def test_a_folder_and_its_splits(tmp_path: Path) -> None:
    write_lines(tmp_path / "train-0.jsonl", '{"x": 0}')
    parquet.write_table(pa.table({"x": [1]}), tmp_path / "train-1.parquet")
    write_lines(tmp_path / "test-0.jsonl", '{"x": 2}', "{")
    assert list(load_rows(str(tmp_path))) == [{"x": 0}, {"x": 1}]
    held_out = load_rows(str(tmp_path), split="test")
    assert (len(held_out), held_out[0]) == (2, {"x": 2})
    with pytest.raises(UnusableRow, match=r"test-0\.jsonl, line 2"):
        held_out.read(1)
    assert len(load_rows(str(tmp_path), split="other")) == 4  # no file is named so


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"\n", "has no rows"),
        ("a.parquet", b"PAR1 not", "cannot be read as a Parquet file"),
        ("a.csv", b"x\n1\n", "neither a JSONL file"),
    ],
)
def test_files_that_are_no_data_set(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DatasetError, match=message):
        load_rows(str(tmp_path / name))


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="contains no file"):
        load_rows(str(tmp_path))
    with pytest.raises(DatasetError, match="there is no file or folder"):
        load_rows(str(tmp_path / "missing.jsonl"))
    with pytest.raises(DatasetError, match="no data set is named"):
        load_rows("")


def test_a_name_of_the_hub_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DatasetError, match=r"the data set demo/no-such-data-set \(split train\) cannot be loaded from the Hugging Face Hub"):
        load_rows("demo/no-such-data-set")


def test_a_large_file_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for number in range(200):
            file.write(json.dumps({"x": number, "text": "y" * 10_000}) + "\n")
    rows = load_rows(str(path))
    assert (len(rows), rows[150]["x"], rows[3]["x"]) == (200, 150, 3)
    assert sum(len(str(value)) for value in vars(rows).values()) < 10_000


def test_a_row_that_names_an_image_is_refused_unless_images_of_rows_are_off() -> None:
    with pytest.raises(UnusableRow, match=r"the row names the image 'python:3\.12', and images of rows are not built yet"):
        refuse_row_image({"prompt": "p", "image": "python:3.12"}, "auto")
    refuse_row_image({"prompt": "p", "image": "python:3.12"}, "never")
    refuse_row_image({"prompt": "p", "image": None}, "auto")

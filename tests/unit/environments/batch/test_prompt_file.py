"""The prompts of a dataset: which lines can be used, how the others are named, and by what a prompt is recognised."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from environments.batch.failures import RunRefused
from environments.batch.files.prompt_file import MAX_NAMED_LINES, BrokenLine, MergedLine, Prompt, read_entries, scan_dataset


def write_lines(folder: Path, *lines: Any) -> Path:
    """Write a dataset; lines that are no bytes are encoded as JSON."""
    path = folder / "prompts.jsonl"
    path.write_bytes(b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines))
    return path


def read(path: Path, *, merge: bool = False, most: int | None = None) -> list[Prompt | BrokenLine | MergedLine]:
    return list(read_entries(path, merge_duplicates=merge, max_samples=most))


def test_rows_keep_their_other_members(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"prompt": "a", "score": 1}, b"", b"  ", {"prompt": "ü", "pool": "gpu"}, {"prompt": "b", "image": "python:3.11", "pool": None})

    first, second, third = (entry for entry in read(path) if isinstance(entry, Prompt))

    assert (first.line, first.text, first.pool, first.image, json.loads(first.other_members)) == (1, "a", None, None, {"score": 1})
    assert (second.line, second.text, second.pool) == (4, "ü", "gpu")
    assert (third.image, third.other_members) == ("python:3.11", "{}")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "x"', "not JSON"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[1]", "not a JSON object"),
        (b'{"text": "x"}', "`prompt` is missing"),
        (b'{"prompt": 3}', "`prompt` is not a text"),
        (b'{"prompt": "  "}', "`prompt` is not a text, or is empty"),
        (b'{"prompt": "x", "pool": 3}', "`pool` is not a text"),
        (b'{"prompt": "x", "image": ""}', "`image` is not a text, or is empty"),
        (b'{"prompt": "x", "image": "i", "pool": "p"}', "both a `pool` and an `image`"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_a_broken_line_is_named_and_its_neighbours_are_used(tmp_path: Path, line: bytes, problem: str) -> None:
    path = write_lines(tmp_path, *({"prompt": str(number)} for number in range(6)), line, {"prompt": "after"})

    scan = scan_dataset(path, merge_duplicates=False, max_samples=None)

    assert (scan.prompt_count, scan.broken_count, scan.broken_lines[0].line) == (7, 1, 7)
    assert str(scan.broken_lines[0]).startswith("line 7: ")
    assert problem in scan.broken_lines[0].problem


def test_a_prompt_is_recognised_by_its_content_and_not_by_its_position(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "n": 1}, {"prompt": "b"}, {"n": 1, "prompt": "a"}, {"prompt": "a", "n": 2}, {"prompt": "\ud800"}]
    before = [entry.key for entry in read(write_lines(tmp_path, *rows)) if isinstance(entry, Prompt)]
    after = [entry.key for entry in read(write_lines(tmp_path, b"broken", *reversed(rows))) if isinstance(entry, Prompt)]

    assert before[0][0] == before[2][0]
    assert [occurrence for _, occurrence in before] == [0, 0, 1, 0, 0]
    assert sorted(before) == sorted(after)
    assert len(set(before)) == 5


def test_duplicates_are_merged_by_prompt_pool_and_image(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"prompt": "a", "n": 1}, {"prompt": "a", "n": 2}, {"prompt": "a", "pool": "p"}, {"prompt": "b"}, {"prompt": "b"})

    entries = read(path, merge=True)
    scan = scan_dataset(path, merge_duplicates=True, max_samples=None)

    assert [type(entry) for entry in entries] == [Prompt, MergedLine, Prompt, Prompt, MergedLine]
    assert (scan.prompt_count, scan.merged_count) == (3, 2)
    assert scan_dataset(path, merge_duplicates=False, max_samples=None).prompt_count == 5


def test_max_samples_counts_usable_lines(tmp_path: Path) -> None:
    path = write_lines(tmp_path, {"prompt": "a"}, b"broken", {"prompt": "b"}, {"prompt": "c"}, b"broken")

    scan = scan_dataset(path, merge_duplicates=False, max_samples=2)

    assert (scan.prompt_count, scan.broken_count) == (2, 1)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    (prompt,) = read(write_lines(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}'))

    assert isinstance(prompt, Prompt)


def test_a_prompt_of_5_mb(tmp_path: Path) -> None:
    (prompt,) = read(write_lines(tmp_path, {"prompt": "x" * 5_000_000}))

    assert isinstance(prompt, Prompt)
    assert len(prompt.text) == 5_000_000


def test_files_without_a_usable_line_are_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(RunRefused) as refused:
            scan_dataset(path, merge_duplicates=False, max_samples=None)
        return refused.value.sentence

    assert "is empty" in refusal(write_lines(tmp_path))
    assert "is empty" in refusal(write_lines(tmp_path, b"", b" "))
    assert "none of the 2 lines" in refusal(write_lines(tmp_path, b"x", b"y"))
    assert "line 1: it is not JSON" in refusal(write_lines(tmp_path, b"x", b"y"))
    assert "No such file" in refusal(tmp_path / "missing.jsonl")
    assert "Is a directory" in refusal(tmp_path)


def test_not_every_broken_line_is_kept(tmp_path: Path) -> None:
    scan = scan_dataset(write_lines(tmp_path, *[b"broken"] * 100, {"prompt": "a"}), merge_duplicates=False, max_samples=None)

    assert (scan.broken_count, len(scan.broken_lines)) == (100, MAX_NAMED_LINES)

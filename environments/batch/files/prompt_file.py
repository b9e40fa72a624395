"""The prompts of a dataset: a JSON Lines file, read line by line, so that its size does not matter."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.batch.failures import RunRefused

#: The members of a row that the runner itself reads. All others are kept in the metadata of the trajectory.
PROMPT, POOL, IMAGE = "prompt", "pool", "image"
#: How many broken lines a scan names. Of the others, only the number is kept.
MAX_NAMED_LINES = 20
_DIGEST_BYTES = 16


class _RowProblem(Exception):
    """A line cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A usable line of the dataset.

    Args:
        line: its number, counted from 1.
        text: the prompt.
        pool: the pool that the row names, or None.
        image: the image that the row names, or None.
        other_members: the other members of the row, as JSON text.
        prompt_id: the hash of the content, in hexadecimal digits.
        occurrence: how many earlier lines have the same hash.
    """

    line: int
    text: str
    pool: str | None
    image: str | None
    other_members: str
    prompt_id: str
    occurrence: int

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the prompt in the dataset, whatever its position."""
        return self.prompt_id, self.occurrence


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that cannot be used, and why."""

    line: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.problem}"


@dataclass(frozen=True, slots=True)
class MergedLine:
    """A line that repeats an earlier one and gets no trajectory of its own."""

    line: int


@dataclass(frozen=True, slots=True)
class DatasetScan:
    """What a dataset holds.

    Args:
        prompt_count: how many trajectories it leads to.
        merged_count: how many lines repeat others and are merged with them.
        broken_count: how many lines cannot be used.
        broken_lines: the first of these lines.
    """

    prompt_count: int
    merged_count: int
    broken_count: int
    broken_lines: tuple[BrokenLine, ...]


def scan_dataset(path: Path, *, merge_duplicates: bool, max_samples: int | None) -> DatasetScan:
    """Read a dataset once, for its size and its broken lines.

    Raises:
        RunRefused: the file cannot be read, or no line can be used.
    """
    prompt_count = merged_count = broken_count = 0
    broken: list[BrokenLine] = []
    for entry in read_entries(path, merge_duplicates=merge_duplicates, max_samples=max_samples):
        match entry:
            case Prompt():
                prompt_count += 1
            case MergedLine():
                merged_count += 1
            case BrokenLine():
                broken_count += 1
                broken += [entry] if len(broken) < MAX_NAMED_LINES else []
    if not prompt_count and not broken_count:
        raise RunRefused(f"--dataset_file: {path} is empty", "give it one JSON object a line, each with a `prompt`")
    if not prompt_count:
        raise RunRefused(f"--dataset_file: none of the {broken_count} lines of {path} can be used; {broken[0]}", "correct the lines")
    return DatasetScan(prompt_count, merged_count, broken_count, tuple(broken))


def read_entries(path: Path, *, merge_duplicates: bool, max_samples: int | None) -> Iterator[Prompt | BrokenLine | MergedLine]:
    """Yield what each line of a dataset is. Blank lines are left out.

    Of the lines that were read, only hashes are kept.

    Args:
        path: the JSON Lines file.
        merge_duplicates: whether lines with the same prompt, pool and image become one; otherwise lines are the same only if all of their members are.
        max_samples: after how many prompts to stop; None for the whole file.

    Raises:
        RunRefused: the file cannot be read.
    """
    seen: dict[bytes, int] = {}
    prompt_count = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if prompt_count == max_samples:
                    return
                if not line.strip():
                    continue
                try:
                    row = _decode_row(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)
                except _RowProblem as problem:
                    yield BrokenLine(number, str(problem))
                    continue
                digest = _content_digest({name: row.get(name) for name in (PROMPT, POOL, IMAGE)} if merge_duplicates else row)
                occurrence = seen.get(digest, 0)
                seen[digest] = occurrence + 1
                if occurrence and merge_duplicates:
                    yield MergedLine(number)
                    continue
                prompt_count += 1
                yield _prompt(number, row, digest.hex(), occurrence)
    except OSError as error:
        raise RunRefused(f"--dataset_file: {path} cannot be read: {error.strerror}", "name a JSON Lines file that this user may read") from error


def _decode_row(line: bytes) -> dict[str, Any]:
    """Decode and check a line.

    Raises:
        _RowProblem: the line cannot be used.
    """
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        raise _RowProblem("it is not UTF-8") from None
    except RecursionError:
        raise _RowProblem("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _RowProblem(f"it is not JSON: {error.msg.removesuffix(' at')}, at character {error.pos + 1}") from None
    except ValueError as error:  # a number of more digits than Python converts
        raise _RowProblem(f"it is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise _RowProblem("it is not a JSON object")
    prompt = row.get(PROMPT)
    if not isinstance(prompt, str) or not prompt.strip():
        raise _RowProblem("`prompt` is missing" if PROMPT not in row else "`prompt` is not a text, or is empty")
    for name in (POOL, IMAGE):
        if row.get(name) is not None and (not isinstance(row[name], str) or not row[name]):
            raise _RowProblem(f"`{name}` is not a text, or is empty")
    if row.get(POOL) is not None and row.get(IMAGE) is not None:
        raise _RowProblem("it names both a `pool` and an `image`; it may name one of them")
    return row


def _content_digest(row: Mapping[str, Any]) -> bytes:
    text = json.dumps(row, sort_keys=True, separators=(",", ":"))  # ASCII, so halves of surrogate pairs do no harm
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()


def _prompt(line: int, row: Mapping[str, Any], prompt_id: str, occurrence: int) -> Prompt:
    others = {name: value for name, value in row.items() if name not in (PROMPT, POOL, IMAGE)}
    return Prompt(line, row[PROMPT], row.get(POOL), row.get(IMAGE), json.dumps(others), prompt_id, occurrence)

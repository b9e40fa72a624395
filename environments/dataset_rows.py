"""The rows of a data set: a JSONL or Parquet file, a folder of such files, or a data set of the Hugging Face Hub.

A row is read when it is used, so that a large data set needs little memory. A row that cannot be read is named by its file and line, or by its number.
"""

from __future__ import annotations

import json
import logging
import re
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet"})
#: The name of a data set of the Hugging Face Hub: `name` or `owner/name`.
HUB_NAME = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


class DatasetError(Exception):
    """A data set cannot be read; the message names it and says what to do."""


class UnusableRow(Exception):
    """A row of a data set cannot be used, whatever the model does; the message says why."""


#: The columns in which rows name the image of their sandbox.
IMAGE_COLUMNS = ("image", "image_name")


def refuse_row_image(row: Mapping[str, Any], row_image: str) -> None:
    """Refuse a row that names the image of its sandbox, because sandboxes of such an image are not built yet.

    Args:
        row: the row.
        row_image: the setting: `never` if the images of rows are not used.

    Raises:
        UnusableRow: the row names an image, and the setting is not `never`.
    """
    image = next((row[column] for column in IMAGE_COLUMNS if row.get(column)), None)
    if image is not None and row_image != "never":
        raise UnusableRow(f"the row names the image {image!r}, and images of rows are not built yet; with row_image=never it runs in the image of the pool")


class Rows(ABC, Sequence[dict[str, Any]]):
    """The rows of a data set, in its order. A row is read, and checked, at each access."""

    @abstractmethod
    def __len__(self) -> int:
        """Return how many rows there are, unreadable ones included."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Return what to call a row in a message, such as `train.jsonl, line 7`."""

    @abstractmethod
    def _read(self, index: int) -> Any:
        """Return the value of a row.

        Raises:
            ValueError: the row cannot be read.
        """

    def read(self, index: int) -> dict[str, Any]:
        """Return a row.

        Args:
            index: the number of the row, from 0.

        Raises:
            UnusableRow: the row cannot be read, or is not an object. The message names the row.
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there is no row {index}: the data set has {len(self)} rows")
        try:
            row = self._read(index)
        except ValueError as error:
            raise UnusableRow(f"{self.name(index)} cannot be read: {error}") from error
        if not isinstance(row, dict):
            raise UnusableRow(f"{self.name(index)} is not an object with columns, but {type(row).__name__}")
        return row

    def __getitem__(self, index: Any) -> Any:
        """Return a row, or a list of rows for a slice. See `read`."""
        if isinstance(index, slice):
            return [self.read(number) for number in range(*index.indices(len(self)))]
        return self.read(index + len(self) if index < 0 else index)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows that can be read. The others are logged by name and left out."""
        for index in range(len(self)):
            try:
                yield self.read(index)
            except UnusableRow as error:
                log.warning("left out: %s", error)


class JsonLines(Rows):
    """The rows of a JSONL file: one JSON object a line. Empty lines are ignored.

    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: list[int] = []
        self._line_numbers: list[int] = []
        offset = 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._offsets.append(offset)
                    self._line_numbers.append(number)
                offset += len(line)

    def __len__(self) -> int:
        return len(self._offsets)

    def name(self, index: int) -> str:
        return f"{self._path}, line {self._line_numbers[index]}"

    def _read(self, index: int) -> Any:
        with self._path.open("rb") as file:
            file.seek(self._offsets[index])
            return json.loads(file.readline())


class ParquetRows(Rows):
    """The rows of a Parquet file. The row group that was read last is kept in memory.

    Raises:
        DatasetError: the file cannot be read, or the package pyarrow is missing.
    """

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow as pa
            from pyarrow import parquet
        except ImportError as error:
            raise DatasetError(f"{path} is a Parquet file, which needs the package pyarrow: pip install 'sandbox-pool[envs]'") from error
        try:
            self._file = parquet.ParquetFile(path)
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"{path} cannot be read as a Parquet file: {error}") from error
        self._path = path
        metadata = self._file.metadata
        self._starts = [0]
        for number in range(metadata.num_row_groups):
            self._starts.append(self._starts[-1] + metadata.row_group(number).num_rows)
        self._group_number = -1
        self._group: Any = None

    def __len__(self) -> int:
        return self._starts[-1]

    def name(self, index: int) -> str:
        return f"{self._path}, row {index}"

    def _read(self, index: int) -> Any:
        number = bisect_right(self._starts, index) - 1
        if number != self._group_number:
            self._group, self._group_number = self._file.read_row_group(number), number
        return self._group.slice(index - self._starts[number], 1).to_pylist()[0]


class HubRows(Rows):
    """The rows of a data set that the library `datasets` has loaded.

    Args:
        source: its name.
        dataset: the loaded data set.
    """

    def __init__(self, source: str, dataset: Any) -> None:
        self._source = source
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def name(self, index: int) -> str:
        return f"{self._source}, row {index}"

    def _read(self, index: int) -> Any:
        return dict(self._dataset[index])


class JoinedRows(Rows):
    """The rows of several files, one after another."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._starts = [0]
        for part in parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def name(self, index: int) -> str:
        part, inside = self._place(index)
        return part.name(inside)

    def _read(self, index: int) -> Any:
        part, inside = self._place(index)
        return part._read(inside)

    def _place(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._starts, index) - 1
        return self._parts[number], index - self._starts[number]


def load_rows(source: str, *, split: str = "train") -> Rows:
    """Open a data set.

    Args:
        source: a JSONL or Parquet file, a folder that contains such files, or the name of a data set of the Hugging Face Hub, such as `owner/name`. A name
            for which there is a file or folder means that file or folder.
        split: which part to read of a data set of the Hub, or of a folder: there, the files whose name or folder begins with it, or all files if none does.

    Raises:
        DatasetError: the data set cannot be read, or has no rows.
    """
    path = Path(source).expanduser()
    if not source:
        raise DatasetError("no data set is named: give a JSONL or Parquet file, a folder of these, or a name of the Hugging Face Hub")
    rows = _local_rows(path, split) if path.exists() else _hub_rows(source, split)
    if not len(rows):
        raise DatasetError(f"the data set {source} has no rows")
    return rows


def _local_rows(path: Path, split: str) -> Rows:
    if path.is_dir():
        files = _files_of_split(path, split)
        if not files:
            raise DatasetError(f"the folder {path} contains no file that ends with .jsonl, .ndjson or .parquet")
        return JoinedRows([_file_rows(file) for file in files])
    return _file_rows(path)


def _files_of_split(folder: Path, split: str) -> list[Path]:
    files = sorted(path for path in folder.rglob("*") if path.suffix in JSON_LINES_SUFFIXES | PARQUET_SUFFIXES and path.is_file())
    of_split = [path for path in files if any(part.startswith(split) for part in path.relative_to(folder).parts)]
    return of_split or files


def _file_rows(path: Path) -> Rows:
    if path.suffix in PARQUET_SUFFIXES:
        return ParquetRows(path)
    if path.suffix not in JSON_LINES_SUFFIXES:
        raise DatasetError(f"{path} is neither a JSONL file (.jsonl, .ndjson) nor a Parquet file (.parquet): rename or convert it")
    try:
        return JsonLines(path)
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}") from error


def _hub_rows(source: str, split: str) -> Rows:
    if not HUB_NAME.match(source) or Path(source).suffix in JSON_LINES_SUFFIXES | PARQUET_SUFFIXES:
        raise DatasetError(f"there is no file or folder {source}, and it is not a name of the Hugging Face Hub (owner/name)")
    try:
        import datasets
    except ImportError as error:
        raise DatasetError(f"{source} is no local file, and the Hugging Face Hub needs the package datasets: pip install 'sandbox-pool[envs]'") from error
    try:
        dataset = datasets.load_dataset(source, split=split)
    except Exception as error:  # the library raises errors of its own, of its HTTP clients and of its file formats, which have no common class
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise DatasetError(
            f"the data set {source} (split {split}) cannot be loaded from the Hugging Face Hub, and there is no such local file: {reason}"
        ) from error
    return HubRows(source, dataset)

"""The files of a small Python project whose parser of durations has a bug, and of the commit that fixes it."""

from __future__ import annotations

PYPROJECT = """\
[build-system]
requires = ["setuptools>=61"]
build-backend = "setuptools.build_meta"

[project]
name = "durations"
version = "0.3.0"
description = "Durations as text: 1h 30m"
requires-python = ">=3.8"

[tool.setuptools.packages.find]
where = ["src"]

[tool.pytest.ini_options]
testpaths = ["tests"]
"""
README = """\
# durations

`parse_duration("1h 30m")` returns 5400 seconds, and `format_duration(5400)` returns `1h 30m`.
"""
PACKAGE = '''\
"""Durations as text, such as `1h 30m`."""

from durations.formatting import format_duration
from durations.parsing import DurationError, parse_duration

__all__ = ["DurationError", "format_duration", "parse_duration"]
'''
UNITS = '''\
"""The units of a duration."""

#: How many seconds each unit has, the largest one first.
SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
'''
FORMATTING = '''\
"""From seconds to text."""

from durations.units import SECONDS


def format_duration(seconds):
    """Return a number of seconds as text, with the largest units first."""
    parts = []
    for unit, size in SECONDS.items():
        count, seconds = divmod(seconds, size)
        if count:
            parts.append(f"{count}{unit}")
    return " ".join(parts) or "0s"
'''
PARSING = '''\
"""From text to seconds."""

import re

from durations.units import SECONDS

_PART = re.compile(r"(\\d+)\\s*([a-z]+)")


class DurationError(ValueError):
    """The text is not a duration."""


def parse_duration(text):
    """Return the number of seconds of a duration such as `1h 30m`."""
    seconds = 0
    end = 0
    for part in _PART.finditer(text.lower()):
        count, unit = part.groups()
        if unit not in SECONDS:
            raise DurationError(f"{unit} is not a unit of time")
        seconds = int(count) * SECONDS[unit]
        end = part.end()
    if end == 0 or text[end:].strip():
        raise DurationError(f"{text!r} is not a duration")
    return seconds
'''
CONFTEST = '''\
"""Examples that several tests use."""

import pytest


@pytest.fixture
def examples():
    return {"1h 30m": 5400, "2d 4h": 187200, "45s": 45}
'''
TEST_FORMATTING = """\
import pytest

from durations import format_duration


def test_examples(examples):
    assert {format_duration(seconds): seconds for seconds in examples.values()} == examples


@pytest.mark.parametrize(("seconds", "text"), [(0, "0s"), (59, "59s"), (3600, "1h")])
def test_one_unit(seconds, text):
    assert format_duration(seconds) == text
"""
TEST_PARSING = """\
import pytest

from durations import DurationError, format_duration, parse_duration


def test_one_unit():
    assert parse_duration("45s") == 45
    assert parse_duration(" 2 h ") == 7200


def test_several_units(examples):
    assert {text: parse_duration(text) for text in examples} == examples


class TestRoundTrip:
    def test_long_duration(self):
        assert parse_duration(format_duration(93784)) == 93784


@pytest.mark.parametrize("text", ["", "soon", "5 parsecs", "1h and more"])
def test_what_is_no_duration(text):
    with pytest.raises(DurationError):
        parse_duration(text)
"""
#: The files of the commit with the bug, by their path.
FILES = {
    ".gitignore": "__pycache__/\n*.egg-info/\n",
    "README.md": README,
    "conftest.py": CONFTEST,
    "pyproject.toml": PYPROJECT,
    "src/durations/__init__.py": PACKAGE,
    "src/durations/formatting.py": FORMATTING,
    "src/durations/parsing.py": PARSING,
    "src/durations/units.py": UNITS,
    "tests/test_formatting.py": TEST_FORMATTING,
    "tests/test_parsing.py": TEST_PARSING,
}
#: The file with the bug, the line that is wrong, and the one that is right.
BUG_PATH = "src/durations/parsing.py"
BUG_LINE = "        seconds = int(count) * SECONDS[unit]\n"
FIXED_LINE = "        seconds += int(count) * SECONDS[unit]\n"
FAIL_TO_PASS = ("tests/test_parsing.py::test_several_units", "tests/test_parsing.py::TestRoundTrip::test_long_duration")
PASS_TO_PASS = (
    "tests/test_formatting.py::test_examples",
    "tests/test_formatting.py::test_one_unit[0-0s]",
    "tests/test_formatting.py::test_one_unit[59-59s]",
    "tests/test_formatting.py::test_one_unit[3600-1h]",
    "tests/test_parsing.py::test_one_unit",
    "tests/test_parsing.py::test_what_is_no_duration[]",
    "tests/test_parsing.py::test_what_is_no_duration[soon]",
    "tests/test_parsing.py::test_what_is_no_duration[5 parsecs]",
    "tests/test_parsing.py::test_what_is_no_duration[1h and more]",
)
PROBLEM_STATEMENT = """\
parse_duration ignores all units but the last one

    >>> from durations import parse_duration
    >>> parse_duration("1h 30m")
    1800

5400 is expected. With a single unit, such as "45s", the result is right.
"""

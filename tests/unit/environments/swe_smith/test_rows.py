"""Tests of what a row of SWE-smith must have, and of the order in which a run uses rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from environments.dataset_rows import UnusableRow, load_rows
from environments.swe_smith.row_order import RowOrder
from environments.swe_smith.rows import MAX_TEST_IDS, PromptMode, build_prompt, check_row, parse_row

ROW: dict[str, Any] = {
    "instance_id": "demo-1", "repo": "owner/name", "base_commit": "0123456789abcdef" * 2 + "01234567", "problem_statement": "It fails.", "text": "More.",
    "PASS_TO_PASS": ["tests/test_b.py::test_1", "tests/test_a.py::test_2"], "FAIL_TO_PASS": '["tests/test_a.py::test_3[x y]"]',
}  # fmt: skip


def test_a_row() -> None:
    row = parse_row(ROW)
    assert row.pass_to_pass == ("tests/test_b.py::test_1", "tests/test_a.py::test_2")
    assert row.fail_to_pass == ("tests/test_a.py::test_3[x y]",)
    assert row.scored_tests(include_fail_to_pass=True) == ("tests/test_a.py::test_2", "tests/test_a.py::test_3[x y]", "tests/test_b.py::test_1")
    assert row.scored_tests(include_fail_to_pass=False) == ("tests/test_a.py::test_2", "tests/test_b.py::test_1")
    assert row.is_python


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"instance_id": ""}, "a row has no instance_id"),
        ({"repo": None}, "row demo-1: the column repo is missing or empty"),
        ({"repo": "../name"}, "row demo-1: repo must be owner/name"),
        ({"repo": "owner/.."}, "row demo-1: repo must be owner/name"),
        ({"repo": "https://host/owner/name"}, "row demo-1: repo must be owner/name"),
        ({"base_commit": "main"}, "row demo-1: base_commit must be the full id of a commit"),
        ({"base_commit": "--upload-pack=x"}, "row demo-1: base_commit must be"),
        ({"problem_statement": " "}, "row demo-1: the column problem_statement is missing"),
        ({"PASS_TO_PASS": None}, "row demo-1: the column PASS_TO_PASS is missing"),
        ({"PASS_TO_PASS": "[tests/test_a.py"}, "row demo-1: PASS_TO_PASS is text that is not JSON"),
        ({"PASS_TO_PASS": "[" * 100_000}, "row demo-1: PASS_TO_PASS is text that is not JSON"),
        ({"FAIL_TO_PASS": {"tests": 2}}, "row demo-1: FAIL_TO_PASS must be a list of test ids"),
        ({"FAIL_TO_PASS": [1]}, "row demo-1: FAIL_TO_PASS must be a list of test ids"),
        ({"FAIL_TO_PASS": ["/etc/x.py::test"]}, "row demo-1: FAIL_TO_PASS has '/etc/x.py::test', which is not a test id"),
        ({"FAIL_TO_PASS": ["../x.py::test"]}, "which is not a test id"),
        ({"FAIL_TO_PASS": ["test_a"]}, "which is not a test id"),
        ({"FAIL_TO_PASS": ["::test_a"]}, "which is not a test id"),
        ({"PASS_TO_PASS": [f"a.py::t{number}" for number in range(MAX_TEST_IDS + 1)]}, "at most 20000 are run"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(UnusableRow, match=message):
        parse_row({**ROW, **changed})


def test_a_row_with_five_thousand_tests_can_be_used() -> None:
    tests = [f"tests/test_a.py::test_many[{number}]" for number in range(5000)]
    assert len(parse_row({**ROW, "PASS_TO_PASS": json.dumps(tests)}).scored_tests(include_fail_to_pass=True)) == 5001


@pytest.mark.parametrize(
    ("changed", "settings", "message"),
    [
        ({"FAIL_TO_PASS": [], "PASS_TO_PASS": []}, {}, "PASS_TO_PASS and FAIL_TO_PASS are empty"),
        ({"PASS_TO_PASS": []}, {"include_fail_to_pass": False}, "PASS_TO_PASS is empty"),
        ({"FAIL_TO_PASS": ["test/a.js::adds"]}, {}, "not all of its tests are in Python files"),
        ({"text": None}, {"prompt_mode": "text"}, "the column text is missing"),
    ],
)
def test_a_row_that_does_not_fit_the_settings(changed: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"include_fail_to_pass": True, "python_only": True, "prompt_mode": "problem_statement"}
    check_row(parse_row(ROW), **defaults)
    with pytest.raises(UnusableRow, match=f"row demo-1: .*{message}"):
        check_row(parse_row({**ROW, **changed}), **{**defaults, **settings})


@pytest.mark.parametrize(("mode", "expected"), [("problem_statement", "It fails."), ("text", "More."), ("problem_statement+text", "It fails.\n\nMore.")])
def test_prompts(mode: PromptMode, expected: str) -> None:
    prompt = build_prompt(parse_row(ROW), mode)
    assert prompt.endswith("\n\n" + expected)
    assert "owner/name" in prompt


class Order:
    """The order of the rows of a file, and what was reported."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.reported: list[tuple[str, str]] = []
        self.excluded: set[str] = set()
        self._order = RowOrder(load_rows(str(path)), parse_row, self._report, **{"max_items": 0, "shuffle": False, "seed": 0, **settings})

    def _report(self, name: str, reason: str) -> None:
        self.reported.append((name, reason))

    def take(self, count: int) -> list[str | None]:
        rows = [self._order.next(lambda row: row["instance_id"] in self.excluded) for _ in range(count)]
        return [None if row is None else row["instance_id"] for row in rows]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rows = [json.dumps({**ROW, "instance_id": name}) for name in "abcd"]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([rows[0], "{", json.dumps({**ROW, "instance_id": "bad", "repo": ""}), *rows[1:]]) + "\n")
    return path


def test_rows_are_used_again_and_again_and_bad_ones_are_reported_once(path: Path) -> None:
    order = Order(path)
    assert order.take(9) == ["a", "b", "c", "d", "a", "b", "c", "d", "a"]
    assert [name.rpartition("/")[2] for name, _ in order.reported] == ["rows.jsonl, line 2", "bad"]


def test_the_first_usable_rows_and_their_replacement(path: Path) -> None:
    order = Order(path, max_items=2)
    assert order.take(3) == ["a", "b", "a"]
    order.excluded.add("b")
    assert order.take(4) == ["c", "a", "c", "a"]
    order.excluded.update("acd")
    assert order.take(2) == [None, None]


def test_shuffled_rows_are_the_same_for_the_same_seed(path: Path) -> None:
    orders = [tuple(Order(path, shuffle=True, seed=seed).take(4)) for seed in range(6)]
    assert orders[0] == tuple(Order(path, shuffle=True, seed=0).take(4))
    assert {frozenset(order) for order in orders} == {frozenset("abcd")}
    assert len(set(orders)) > 1

from __future__ import annotations

from typing import Any

import pytest

from sandbox_server.agent.inslot.arguments import MAX_CONTENT_BYTES, OPERATIONS
from sandbox_server.agent.inslot.child import check_args, import_operation

FINE: list[tuple[str, dict[str, Any]]] = [
    ("read_file", {"path": "a"}),
    ("read_file", {"path": "a", "offset": None, "limit": None}),
    ("read_file", {"path": "caf\udce9", "offset": 0, "limit": 1}),
    ("write_file", {"path": "a", "content": "", "mode": "0755"}),
    ("write_file", {"path": "a", "content": "nul\0"}),
    ("edit_file", {"path": "a", "old": "x", "new": "", "replace_all": True}),
    ("list_files", {}),
    ("search_files", {"pattern": "("}),
    ("route_put", {"path": "a", "mode": 0o644}),
    ("route_put", {"path": "a", "mode": "644", "size_bytes": 5}),
]

WRONG: list[tuple[str, Any, str]] = [
    ("rm", {}, "there is no operation 'rm'"),
    ("read_file", None, "the arguments of read_file must be an object, not null"),
    ("read_file", [], "the arguments of read_file must be an object, not a list"),
    ("read_file", {}, "read_file needs the argument path"),
    ("read_file", {"path": None}, "path must be a string, not null"),
    ("read_file", {"path": 5}, "path must be a string, not a number"),
    ("read_file", {"path": ""}, "path must not be empty"),
    ("read_file", {"path": "a\0b"}, "path must not contain a NUL character"),
    ("read_file", {"path": "é" * 2048}, "path is 4096 bytes long; the limit is 4095 bytes"),
    ("read_file", {"path": "\ud800"}, "path contains an unpaired surrogate, which is not a character"),
    ("read_file", {"path": "a", "lines": 3}, "read_file has no argument 'lines'; it takes path, offset, limit"),
    ("read_file", {"path": "a", 5: 3}, "read_file has no argument 5; it takes path, offset, limit"),
    ("read_file", {"path": "a", "offset": -1}, "offset must be from 0 to 1000000000"),
    ("read_file", {"path": "a", "limit": 0}, "limit must be from 1 to 1000000000"),
    ("read_file", {"path": "a", "limit": True}, "limit must be a whole number, not a boolean"),
    ("read_file", {"path": "a", "limit": 1.0}, "limit must be a whole number, not a number"),
    ("read_file", {"path": "a", "limit": "5"}, "limit must be a whole number, not a string"),
    ("write_file", {"path": "a"}, "write_file needs the argument content"),
    ("write_file", {"path": "a", "content": "x" * (MAX_CONTENT_BYTES + 1)}, "content is 16777217 bytes long; the limit is 16777216 bytes"),
    ("write_file", {"path": "a", "content": "", "mode": 644}, 'mode must be a string of octal digits up to "0777", such as "0644"'),
    ("write_file", {"path": "a", "content": "", "mode": "4755"}, 'mode must be a string of octal digits up to "0777", such as "0644"'),
    ("write_file", {"path": "a", "content": "", "mode": "rwx"}, 'mode must be a string of octal digits up to "0777", such as "0644"'),
    ("write_file", {"path": "a", "content": "", "mode": ""}, 'mode must be a string of octal digits up to "0777", such as "0644"'),
    ("edit_file", {"path": "a", "old": "", "new": "x"}, "old must not be empty; to make a new file use write_file"),
    ("edit_file", {"path": "a", "old": "x", "new": "x"}, "old and new are the same: there is nothing to replace"),
    ("edit_file", {"path": "a", "old": "x", "new": "y", "replace_all": 1}, "replace_all must be true or false, not a number"),
    ("list_files", {"max_entries": 10_001}, "max_entries must be from 1 to 10000"),
    ("search_files", {"pattern": ""}, "pattern must have 1 to 10000 characters, not 0"),
    ("route_put", {"path": "a", "mode": 0o1777}, "mode must be from 0 to 511"),
]


@pytest.mark.parametrize(("op", "args"), FINE)
def test_good_arguments_pass(op: str, args: dict[str, Any]) -> None:
    assert check_args(op, args) is None


@pytest.mark.parametrize(("op", "args", "sentence"), WRONG)
def test_bad_arguments_are_named(op: str, args: Any, sentence: str) -> None:
    assert check_args(op, args) == sentence


def test_every_operation_is_there() -> None:
    assert all(callable(import_operation(op)) for op in OPERATIONS)
    assert import_operation("rm") is None

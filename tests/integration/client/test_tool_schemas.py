"""Tests that the schemas of the slot tools accept what the service accepts, and refuse what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest

from env_client import Lease, SandboxClient, available_tools, tool_schemas
from env_client.tools import BASE_TOOLS, OPTIONAL_TOOLS, TIMEOUT_ARGUMENTS
from tests.support.service import Service

#: Arguments that each tool accepts: those that it needs, and all that it takes.
NEEDED: Mapping[str, dict[str, Any]] = {
    "terminal": {"command": "true"},
    "process": {"action": "list"},
    "read_file": {"path": "a.txt"},
    "write_file": {"path": "new.txt", "content": "x"},
    "edit_file": {"path": "a.txt", "old": "b", "new": "b"},
    "list_files": {},
    "search_files": {"pattern": "a"},
}
ALL: Mapping[str, dict[str, Any]] = {
    "terminal": {"command": "true", "cwd": "/tmp", "env": {"NAME": "value"}, "stdin": "text"},
    "process": {"action": "list"},
    "read_file": {"path": "a.txt", "offset": 1, "limit": 2},
    "write_file": {"path": "new.txt", "content": "x", "mode": "0644"},
    "edit_file": {"path": "a.txt", "old": "b", "new": "c", "replace_all": True},
    "list_files": {"path": ".", "recursive": True, "max_entries": 5},
    "search_files": {"pattern": "a", "path": ".", "glob": "*.txt", "max_matches": 5},
}
VALUES: tuple[Any, ...] = (
    "", "a", ".", "0755", "8", "0777", "1777", "000777", 0, 1, -1, 10_000, 10_001, 1_000_000_000, 1_000_000_001, 1.5, True, False, [], ["a"], {},
    {"A": "b"}, {"A": 1},
)  # fmt: skip
JOB_ARGUMENTS: Mapping[str, Any] = {"command": "true", "process_id": "p-0", "offset": 0, "data": "x"}
#: Where a schema says less than the service enforces: servers of chat completions do not take such rules.
SAID_IN_DESCRIPTIONS: Mapping[str, tuple[str, ...]] = {
    "edit_file": ("old and new are the same",),
    "search_files": ("is not a regular expression",),
    "process": tuple(f"process {action} {said}" for action in ("start", "list", "poll", "log", "write", "kill") for said in ("needs", "has no")),
}


@pytest.fixture(scope="module")
def lease(service: Service) -> Iterator[Lease]:
    with SandboxClient(service.url, service.token) as client, client.lease(wait_s=30) as held:
        yield held


def schema_accepts(tool: str, args: Any) -> bool:
    (schema,) = tool_schemas([tool])
    return bool(jsonschema_rs.is_valid(schema["function"]["parameters"], args))


def variations(tool: str) -> Iterator[Any]:
    """Yield arguments of every kind: complete ones, one missing, one unknown, and each one with every value."""
    yield from (NEEDED[tool], ALL[tool], {})
    for name in ALL[tool]:
        yield {key: value for key, value in ALL[tool].items() if key != name}
        yield from ({**ALL[tool], name: value} for value in VALUES)
    yield from ({**NEEDED[tool], name: "x"} for name in ("timeout", "allow_network", "lease_id", "shell", "Command", " command"))
    yield from ("ls", ["ls"], 3, True)


def check_each(lease: Lease, service: Service, tool: str, every: list[Any]) -> list[str]:
    """Run calls with these arguments; return where the schema and the service disagree, except what the schema says only in a description."""
    found = []
    with SandboxClient(service.url, service.token) as client:
        for args, result in zip(every, client.exec_batch([lease.call(tool, args, timeout_s=10) for args in every]), strict=True):
            assert result.fault != "infra", result
            accepted = result.reason != "invalid_args"
            only_described = any(sentence in result.error for sentence in SAID_IN_DESCRIPTIONS.get(tool, ()))
            if accepted != schema_accepts(tool, args) and not (only_described and not accepted):
                found.append(f"{tool} {args}: the service says {result.reason} {result.error}")
    return found


@pytest.mark.parametrize("tool", BASE_TOOLS)
def test_a_schema_accepts_what_the_service_accepts(lease: Lease, service: Service, tool: str) -> None:
    lease.exec("write_file", {"path": "a.txt", "content": "a\nb\n"})

    assert schema_accepts(tool, NEEDED[tool])
    assert check_each(lease, service, tool, list(variations(tool))) == []


@pytest.mark.parametrize("tool", [tool for tool in BASE_TOOLS if tool != "process"])
def test_a_schema_requires_what_the_service_requires(lease: Lease, tool: str) -> None:
    (schema,) = tool_schemas([tool])
    for name in schema["function"]["parameters"]["properties"]:
        args = {key: value for key, value in ALL[tool].items() if key != name}
        needed = lease.exec(tool, args).error.endswith(f"needs the argument {name}")

        assert needed == (name in schema["function"]["parameters"]["required"]), name


@pytest.mark.parametrize("action", ["start", "list", "poll", "log", "write", "kill", "stop", "", None, 3])
def test_the_schema_of_jobs_accepts_every_call_that_the_service_accepts(lease: Lease, service: Service, action: Any) -> None:
    subsets = itertools.chain.from_iterable(itertools.combinations(JOB_ARGUMENTS, count) for count in range(len(JOB_ARGUMENTS) + 1))

    assert check_each(lease, service, "process", [{"action": action, **{name: JOB_ARGUMENTS[name] for name in names}} for names in subsets]) == []


def test_null_is_an_argument_that_is_not_given(lease: Lease) -> None:
    for tool, needed in NEEDED.items():
        optional = ALL[tool].keys() - needed.keys()
        if tool == "edit_file":
            needed = ALL[tool]
        assert lease.exec(tool, {**needed, **dict.fromkeys(optional)}).reason != "invalid_args", tool


def test_a_pool_offers_the_base_tools(service: Service) -> None:
    with SandboxClient(service.url, service.token) as client:
        capabilities = client.pool("default").capabilities

    assert available_tools(capabilities) == (*BASE_TOOLS, *OPTIONAL_TOOLS)


def test_the_service_takes_no_timeout_as_an_argument(lease: Lease) -> None:
    assert {lease.exec("terminal", {"command": "true", name: 1}).reason for name in TIMEOUT_ARGUMENTS} == {"invalid_args"}

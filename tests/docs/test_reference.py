"""Tests that the reference pages are complete and list nothing else: settings, limits, errors, reasons, states, routes, metrics, tools, commands."""

from __future__ import annotations

import dataclasses
import json
import re
import signal
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from env_client import errors as client_errors
from env_client.cli.app import app as cli_app
from env_client.cli.arguments import COMMAND_TTL_S
from env_client.cli.exit_codes import CANNOT_START, NOT_CLEAN, NOT_FOUND, OUT_OF_MEMORY, OWN_FAILURE, SOMETHING_MISSING, TIMED_OUT
from sandbox_server.agent.execution.tools.tool_registry import TOOLS
from sandbox_server.api.api import every_route
from sandbox_server.api.contract.requests import PoolSpecBody
from sandbox_server.api.contract.specs import ADMINS_ONLY
from sandbox_server.api.limits import LIMITS, Limits, most_of, text_of
from sandbox_server.api.problems import STATUS_OF
from sandbox_server.api.routes.pending import PENDING
from sandbox_server.api.routes.ports import use_port
from sandbox_server.core.execution import FAULTS_OF
from sandbox_server.core.lifecycle import SANDBOX_TRANSITIONS, SLOT_TRANSITIONS
from sandbox_server.core.types import SandboxState
from sandbox_server.settings.environment import CLIENTS_OWN, PREFIX, EnvironmentModel
from sandbox_server.settings.file import DockerModel, NomadModel, SettingsFile, TenantModel
from sandbox_server.telemetry import METRICS
from tests.support import tables
from tests.support.users import ROOT

DOCS = ROOT / "docs"
EVENT_KIND = r'"((?:lease|pool|sandbox|slot)\.[a-z]+)"'


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


def rows(name: str, table: str) -> list[list[str]]:
    """Return the rows of the table that follows a marker, without its heading and without backticks."""
    text = page(name).partition(f"<!-- {table} -->\n")[2].partition("\n\n")[0]
    return [[cell.replace("`", "") for cell in row] for row in tables.parse(text)[1:]]


def words(row: list[list[str]]) -> list[str]:
    return [cells[0] for cells in row]


def default_of(model: type[BaseModel], name: str) -> Any:
    """Return the default of a field as a JSON value."""
    field = model.model_fields[name]
    value = field.get_default(call_default_factory=True)
    return "required" if value is PydanticUndefined else value


def spec_defaults() -> dict[str, Any]:
    """Return the fields of a pool spec with their defaults; nested fields have dotted names."""
    found: dict[str, Any] = {}
    for name in PoolSpecBody.model_fields:
        value = default_of(PoolSpecBody, name)
        found.update({f"{name}.{inner}": getattr(value, inner) for inner in type(value).model_fields} if isinstance(value, BaseModel) else {name: value})
    return found


def test_every_error_code_with_its_status() -> None:
    assert [(code, int(status)) for code, status, *_ in rows("errors-and-reasons.md", "errors")] == list(STATUS_OF.items())


def test_every_reason_with_its_fault() -> None:
    said = [(reason, fault.split(", ")) for reason, _, fault, _ in rows("errors-and-reasons.md", "reasons")]

    assert said == [(str(reason), [str(fault) for fault in faults]) for reason, faults in FAULTS_OF.items()]


def test_every_error_that_the_client_raises_on_its_own() -> None:
    own = {
        name for name, one in vars(client_errors).items()
        if isinstance(one, type) and issubclass(one, client_errors.SandboxError) and not issubclass(one, client_errors.ServiceError)
    }  # fmt: skip

    named = set(re.findall(r"`([A-Z]\w+)`", page("errors-and-reasons.md").partition("## What the clients raise")[2]))

    assert named == own - {"SandboxError", "TransportError"}


def test_every_limit_with_its_default_and_meaning() -> None:
    said = [(name, default, counts) for name, default, counts, _ in rows("limits.md", "limits")]

    assert said == [(name, f"{getattr(Limits(), name):,}" + (" (at most)" if most_of(name) else ""), text_of(name)) for name in LIMITS]


@pytest.mark.parametrize(
    ("table", "model"),
    [("file", SettingsFile), ("tenant", TenantModel), ("nomad", NomadModel), ("docker", DockerModel)],
    ids=["file", "tenant", "nomad", "docker"],
)  # fmt: skip
def test_every_key_of_the_settings_file(table: str, model: type[BaseModel]) -> None:
    assert words(rows("settings.md", table)) == list(model.model_fields)
    for key, default, *_ in rows("settings.md", table):
        value = default_of(model, key)
        if not isinstance(value, dict | list | BaseModel):
            assert default == ("–" if value is None else value if isinstance(value, str) else json.dumps(value)), key


def test_every_variable() -> None:
    assert words(rows("settings.md", "environment")) == [PREFIX + name for name in EnvironmentModel.model_fields]
    assert all(f"`{name}`" in page("settings.md") for name in CLIENTS_OWN)


def test_every_field_of_a_pool_spec_with_its_default() -> None:
    assert [(field, json.loads(default)) for field, default, _ in rows("settings.md", "spec")] == list(spec_defaults().items())


def test_the_readme_lists_what_is_not_built_yet() -> None:
    said = (ROOT / "README.md").read_text(encoding="utf-8").partition("### Not built yet")[2].partition("\n#")[0]
    routes = {f"{method} {path.replace('lease_id', 'id')}" for method, path, *_ in PENDING}

    assert [name for name in routes if f"`{name}`" not in said] == []


def test_the_fields_that_only_admins_may_set_are_listed() -> None:
    assert {f"`{path}`" for path in ADMINS_ONLY} <= set(re.findall(r"`[^`]+`", page("settings.md").partition("Only admins set ")[2]))


@pytest.mark.parametrize(("table", "moves"), [("slot moves", SLOT_TRANSITIONS), ("sandbox moves", SANDBOX_TRANSITIONS)], ids=["slot", "sandbox"])
def test_every_move_of_slots_and_sandboxes(table: str, moves: Any) -> None:
    assert sorted((start, end) for start, _, end in rows("concepts.md", table)) == sorted((str(start), str(end)) for (start, _), end in moves.items())


def test_every_tool() -> None:
    assert set(words(rows("tools.md", "tools"))) == set(TOOLS)


def test_every_route() -> None:
    built = {
        f"{'ANY' if route.endpoint is use_port else method} {re.sub(r'{(lease|sandbox)_id}', '{id}', route.path_format)}"
        for route in every_route()
        if route.include_in_schema
        for method in route.methods
    }

    assert set(words(rows("http-api.md", "routes"))) | set(words(rows("http-api.md", "not built"))) == built
    assert set(words(rows("http-api.md", "not built"))) == {f"{method} {path.replace('lease_id', 'id')}" for method, path, *_ in PENDING}


def test_every_figure_with_its_labels() -> None:
    assert {(name, labels) for name, labels, _ in rows("operations.md", "figures")} == {
        (name, ", ".join(figure.labels) or "–") for name, figure in METRICS.items()
    }


def test_no_limit_is_listed_twice() -> None:
    assert len({field.name for field in dataclasses.fields(Limits)}) == len(rows("limits.md", "limits"))


def test_every_command() -> None:
    commands = [f"sandbox {one.name}" for one in cli_app.registered_commands]
    for group in cli_app.registered_groups:
        assert group.typer_instance is not None
        commands += [f"sandbox {group.name} {one.name}" for one in group.typer_instance.registered_commands]

    assert sorted(words(rows("command-line.md", "commands"))) == sorted(commands)


def test_every_kind_of_event() -> None:
    published = {kind for path in (ROOT / "sandbox_server" / "pool").rglob("*.py") for kind in re.findall(EVENT_KIND, path.read_text(encoding="utf-8"))}
    said = set(re.findall(EVENT_KIND.replace('"', "`"), page("http-api.md").partition("## Events")[2]))

    assert said == published | {f"sandbox.{state}" for state in SandboxState}


def test_every_exit_code_of_the_command_line() -> None:
    said = {row[0] for row in tables.parse(page("command-line.md").partition("## Exit codes")[2])[1:]}

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGKILL)
    own = {OWN_FAILURE, TIMED_OUT, CANNOT_START, NOT_FOUND, OUT_OF_MEMORY, SOMETHING_MISSING, NOT_CLEAN, *(128 + number for number in signals)}
    assert said - {"0 to 123", "128+n"} == {str(code) for code in own}


def test_the_default_time_to_live_of_the_command_line() -> None:
    assert f"by default for {COMMAND_TTL_S:g}, an hour" in page("command-line.md")

"""The OpenAPI document says what the contract says."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_server.api.api import every_route
from sandbox_server.api.edge import OPEN_PATHS
from sandbox_server.api.problems import STATUS_OF
from tests.contract.contract import BUILT, CONTRACT, DOCUMENTED, ROUTES, WAITING, WEBSOCKETS, members, named, shape
from tests.support.service_harness import ServiceHarness

SUCCESSES = {"101", "200", "201", "202", "204"}
SHAPES = {"lease": "LeaseAnswer", "result": "ResultAnswer", "pool": "PoolAnswer", "entry": "FileEntry", "lost": "LostLease"}
BODIES = {"acquire": "AcquireBody", "call": "CallBody", "release": "ReleaseBody", "renew": "RenewBody", "narrow": "NarrowBody", "spec": "PoolSpecBody"}


async def document(harness: ServiceHarness) -> dict[str, Any]:
    found: dict[str, Any] = (await harness.http.get("/openapi.json")).json()
    return found


async def operation(harness: ServiceHarness, route: dict[str, Any]) -> dict[str, Any]:
    paths = (await document(harness))["paths"]
    (found,) = [operations for path, operations in paths.items() if shape(path) == route["path"]]
    one: dict[str, Any] = found[route["method"].lower()]
    return one


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


async def test_the_document_has_every_route_of_the_contract_and_no_other(harness: ServiceHarness) -> None:
    paths = (await document(harness))["paths"]

    found = {(method.upper(), shape(path)) for path, operations in paths.items() for method in operations}
    assert found == {(route["method"], route["path"]) for route in DOCUMENTED}


async def test_every_reference_leads_somewhere(harness: ServiceHarness) -> None:
    found = await document(harness)

    assert {reference for reference in references(found) if reference.rpartition("/")[2] not in found["components"]["schemas"]} == set()


async def test_every_operation_names_its_parameters_its_answers_and_who_may_call(harness: ServiceHarness) -> None:
    for path, operations in (await document(harness))["paths"].items():
        for one in operations.values():
            in_path = {parameter["name"] for parameter in one["parameters"] if parameter["in"] == "path"}
            assert in_path == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert (one["security"] == []) == (path in OPEN_PATHS)
            assert ("401" in one["responses"]) == (path not in OPEN_PATHS)
            assert set(one["responses"]) - SUCCESSES <= {str(status) for status in STATUS_OF.values()}
            assert one["summary"]


@pytest.mark.parametrize("route", [*BUILT, *WEBSOCKETS], ids=named)
async def test_an_operation_takes_and_answers_what_the_contract_says(harness: ServiceHarness, route: dict[str, Any]) -> None:
    found = await operation(harness, route)
    success = found["responses"][str(route["status"])]
    types = success.get("content", {})

    assert {parameter["name"] for parameter in found["parameters"] if parameter["in"] == "query"} == set(route.get("query", ()))
    assert {parameter["name"] for parameter in found["parameters"] if parameter["in"] == "header"} == set(route.get("headers", ()))
    assert "*/*" in types or set(types) >= {*route.get("also", ()), *([route["media"]] if "media" in route else [])}
    body = found.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {}).get("$ref", "")
    assert body.rpartition("/")[2] == route.get("body", "")
    if "answer" in route:
        name = types["application/json"]["schema"]["$ref"].rpartition("/")[2]
        fields = (await document(harness))["components"]["schemas"][name]["properties"]
        assert members(route["answer"]) <= set(fields)
        assert ("next_cursor" in fields) == route.get("list", False)


@pytest.mark.parametrize("name", SHAPES)
async def test_an_answer_has_the_fields_of_the_contract(harness: ServiceHarness, name: str) -> None:
    schema = (await document(harness))["components"]["schemas"][SHAPES[name]]

    assert set(schema["properties"]) == {*CONTRACT["shapes"][name], *CONTRACT["optional"].get(name, ())}
    assert set(schema["required"]) == set(CONTRACT["shapes"][name])


@pytest.mark.parametrize("name", BODIES)
async def test_a_body_has_the_fields_and_defaults_of_the_contract(harness: ServiceHarness, name: str) -> None:
    schemas = (await document(harness))["components"]["schemas"]

    defaults = defaults_of(schemas, BODIES[name])

    assert {field: defaults[field] for field in CONTRACT["bodies"][name]} == CONTRACT["bodies"][name]


def defaults_of(schemas: dict[str, Any], model: str) -> dict[str, Any]:
    """What a body comes to that says nothing."""
    defaults: dict[str, Any] = {}
    for field, schema in schemas[model]["properties"].items():
        if "$ref" in schema:
            defaults[field] = defaults_of(schemas, schema["$ref"].rpartition("/")[2])
        else:
            empty = {"object": {}, "array": []}.get(schema.get("type", ""))
            defaults[field] = schema.get("default", empty)
    return defaults


async def test_the_closed_sets_are_the_contracts(harness: ServiceHarness) -> None:
    schemas = (await document(harness))["components"]["schemas"]
    result = schemas["ResultAnswer"]["properties"]

    assert set(result["reason"]["enum"]) == set(CONTRACT["reasons"])
    assert set(result["fault"]["enum"]) == {fault for faults in CONTRACT["reasons"].values() for fault in faults}
    assert set(schemas["PoolAnswer"]["properties"]["state"]["enum"]) == set(CONTRACT["shapes"]["pool_state"])
    assert set(CONTRACT["problem"]) <= set(schemas["ProblemAnswer"]["properties"])
    assert CONTRACT["errors"] == STATUS_OF


@pytest.mark.parametrize("route", WEBSOCKETS, ids=named)
async def test_a_request_without_an_upgrade_is_told_to_connect(harness: ServiceHarness, route: dict[str, Any]) -> None:
    answer = await harness.http.request(route["method"], route["path"].replace("{}", "x"))

    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert "ws://" in answer.json()["detail"]


@pytest.mark.parametrize("route", WAITING, ids=named)
async def test_what_waits_says_so(harness: ServiceHarness, route: dict[str, Any]) -> None:
    answer = await harness.http.request(route["method"], route["path"].replace("{}", "x"))

    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented")


@pytest.mark.parametrize("route", ROUTES, ids=named)
async def test_only_the_open_paths_answer_without_a_token(harness: ServiceHarness, route: dict[str, Any]) -> None:
    answer = await harness.http.request(route["method"], route["path"].replace("{}", "x"), headers={"Authorization": ""})

    assert (answer.status_code == 401) == (not route.get("open", False))


def test_no_path_is_open_that_the_contract_does_not_open() -> None:
    assert {route["path"] for route in ROUTES if route.get("open")} == OPEN_PATHS
    assert {route.path for route in every_route()} >= OPEN_PATHS

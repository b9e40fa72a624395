"""The OpenAPI document says what the routes do."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_server.api.api import every_route
from sandbox_server.api.front import OPEN_PATHS
from sandbox_server.api.problems import STATUS_OF
from tests.support.house import House

# Every route of the contract, as its page lists them.
CONTRACT = {
    ("POST", "/v1/acquire"), ("POST", "/v1/exec-batch"), ("POST", "/v1/release"), ("POST", "/v1/renew"), ("POST", "/v1/cancel"),
    ("POST", "/v1/leases/{}/narrow"), ("GET", "/v1/leases"), ("GET", "/v1/leases/{}"), ("POST", "/v1/leases/{}/exec"),
    ("GET", "/v1/leases/{}/calls/{}"), ("GET", "/v1/leases/{}/calls/{}/events"), ("GET", "/v1/leases/{}/calls/{}/output"),
    ("GET", "/v1/leases/{}/files"), ("PUT", "/v1/leases/{}/files"), ("GET", "/v1/leases/{}/files/list"),
    ("GET", "/v1/leases/{}/archive"), ("PUT", "/v1/leases/{}/archive"), ("GET", "/v1/leases/{}/terminal"),
    ("GET", "/v1/pools"), ("GET", "/v1/pools/{}"), ("PUT", "/v1/pools/{}"), ("DELETE", "/v1/pools/{}"), ("POST", "/v1/pools/{}/verify"),
    ("GET", "/v1/sandboxes"), ("POST", "/v1/sandboxes/{}/drain"), ("GET", "/v1/events"), ("GET", "/healthz"), ("GET", "/readyz"),
    ("GET", "/metrics"), ("GET", "/"), ("GET", "/docs"), ("GET", "/v1/agent.pyz"),
}  # fmt: skip
NOT_BUILT = {
    ("POST", "/v1/leases/{}/narrow"), ("GET", "/v1/leases/{}/calls/{}"), ("GET", "/v1/leases/{}/calls/{}/events"),
    ("GET", "/v1/leases/{}/calls/{}/output"), ("GET", "/v1/leases/{}/terminal"), ("PUT", "/v1/pools/{}"), ("DELETE", "/v1/pools/{}"),
    ("POST", "/v1/pools/{}/verify"), ("GET", "/v1/sandboxes"), ("POST", "/v1/sandboxes/{}/drain"), ("GET", "/v1/events"), ("GET", "/metrics"),
    ("GET", "/"), ("GET", "/docs"), ("GET", "/v1/agent.pyz"),
}  # fmt: skip


def shape(path: str) -> str:
    """A path with its parameters nameless."""
    return "/".join("{}" if part.startswith("{") else part for part in path.split("/"))


async def document(house: House) -> dict[str, Any]:
    found: dict[str, Any] = (await house.http.get("/openapi.json")).json()
    return found


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(references(child) for child in node.values()))
    return set().union(*(references(child) for child in node)) if isinstance(node, list) else set()


async def test_the_document_has_every_route_of_the_contract_and_no_other(house: House) -> None:
    paths = (await document(house))["paths"]

    assert {(method.upper(), shape(path)) for path, operations in paths.items() for method in operations} == CONTRACT


async def test_every_reference_leads_somewhere(house: House) -> None:
    found = await document(house)

    assert {reference for reference in references(found) if reference.rpartition("/")[2] not in found["components"]["schemas"]} == set()


async def test_every_operation_names_its_parameters_its_answers_and_who_may_call(house: House) -> None:
    for path, operations in (await document(house))["paths"].items():
        for operation in operations.values():
            in_path = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "path"}
            assert in_path == {part[1:-1] for part in path.split("/") if part.startswith("{")}
            assert (operation["security"] == []) == (path in OPEN_PATHS)
            assert ("401" in operation["responses"]) == (path not in OPEN_PATHS)
            assert set(operation["responses"]) - {"200", "204"} <= {str(status) for status in STATUS_OF.values()}
            assert operation["summary"]


@pytest.mark.parametrize(("method", "path"), sorted(NOT_BUILT))
async def test_what_is_not_built_says_so(house: House, method: str, path: str) -> None:
    answer = await house.http.request(method, path.replace("{}", "x"))

    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented")


@pytest.mark.parametrize(("method", "path"), sorted(CONTRACT))
async def test_only_the_open_paths_answer_without_a_token(house: House, method: str, path: str) -> None:
    answer = await house.http.request(method, path.replace("{}", "x"), headers={"Authorization": ""})

    assert (answer.status_code == 401) == (path not in OPEN_PATHS)


def test_no_path_is_open_that_the_contract_does_not_open() -> None:
    assert {"/", "/docs", "/healthz", "/readyz", "/v1/agent.pyz"} == OPEN_PATHS
    assert {route.path for route in every_route()} >= OPEN_PATHS


async def test_an_event_stream_of_a_call_is_not_built(house: House) -> None:
    (lease_id,) = await house.acquire()

    answer = await house.http.post(f"/v1/leases/{lease_id}/exec", json={"command": "true"}, headers={"Accept": "text/event-stream"})

    assert (answer.status_code, answer.json()["code"]) == (501, "not_implemented")

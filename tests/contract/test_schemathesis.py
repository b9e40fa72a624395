"""Requests that a machine makes up from the OpenAPI document, against the whole service: no 5xx but those that the document names, and none hangs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from sandbox_server.api.api import RoutedApplication, openapi_document
from sandbox_server.api.limits import Limits
from tests.contract.contract import CONTRACT, ROUTES, named, shape
from tests.support.service_harness import ALICE, POOL, bearer, make_application, make_settings

ANSWERS_WITHIN_S = 10.0
ENDLESS = {"/v1/events"}
"""Streams without an end: their first bytes are the answer."""


@schemathesis.serializer("application/gzip")
def _as_it_is(ctx: Any, value: Any) -> bytes:
    """Archives are bytes; that they are no archive is the slot's to say."""
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


def openapi() -> dict[str, Any]:
    return openapi_document(RoutedApplication())


SCHEMA = schemathesis.openapi.from_dict(openapi())
ASKED = {named(route) for route in ROUTES}
OPERATIONS = {
    f"{operation.method.upper()} {operation.path}": operation
    for operation in (found.ok() for found in SCHEMA.get_all_operations())
    if f"{operation.method.upper()} {shape(operation.path)}" in ASKED
}


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """The service behind a real port, on a thread of its own; one lease is `held`, with a call `c`."""
    quick = Limits(call_wait_s=1, pools=8, pool_sandboxes=2, pool_slots=8)
    impatient = {"default": replace(POOL, acquire_timeout_s=0.2)}
    told = make_settings(Path(tmp_path_factory.mktemp("state")), limits=quick, pools=impatient)
    application, _ = make_application(told)
    server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, lifespan="on", log_config=None, access_log=False))
    serving = threading.Thread(target=server.run)
    serving.start()
    while not server.started:
        time.sleep(0.01)  # uvicorn has no event for it
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    with httpx.Client(base_url=url, headers=bearer(ALICE), timeout=ANSWERS_WITHIN_S, trust_env=False) as client:
        yield client
    server.should_exit = True
    serving.join()


@pytest.fixture(scope="module")
def lease_id(http: httpx.Client) -> str:
    held: str = http.post("/v1/acquire", json={"ttl_s": 3600}).json()["leases"][0]["lease_id"]
    http.post(f"/v1/leases/{held}/exec", json={"command": "echo hi", "call_id": "c"})
    return held


def statuses(name: str) -> set[int]:
    """What the document says that an operation may answer with."""
    method, _, path = name.partition(" ")
    return {int(status) for status in openapi()["paths"][path][method.lower()]["responses"]}


def send(http: httpx.Client, case: Any, is_endless: bool) -> httpx.Response:
    """Send a made-up request as it is; of a stream without an end, its first bytes are read."""
    made = case.as_transport_kwargs(base_url=str(http.base_url).rstrip("/"))
    given = {key: made[key] for key in ("method", "url", "headers", "params", "json", "data") if made.get(key) is not None}
    if isinstance(given.get("data"), bytes | str):
        given["content"] = given.pop("data")
    given["headers"] = {**dict(given.get("headers", {})), **bearer(ALICE)}
    with contextlib.suppress(KeyError):
        del given["headers"]["Content-Length"]
    with http.stream(**given) as answer:
        if is_endless and answer.status_code == 200:
            next(answer.iter_raw())
        else:
            answer.read()
    return answer


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.timeout(180)
def test_an_operation_answers_whatever_is_asked(name: str, http: httpx.Client, lease_id: str) -> None:
    operation, allowed = OPERATIONS[name], statuses(name)
    cases = st.one_of(operation.as_strategy(), operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE))

    @settings(max_examples=25, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck), derandomize=True)
    @given(case=cases, is_held=st.booleans())
    def ask(case: Any, is_held: bool) -> None:
        if is_held and "lease_id" in (case.path_parameters or {}):
            case.path_parameters["lease_id"] = lease_id
            if "call_id" in case.path_parameters:
                case.path_parameters["call_id"] = "c"
        if isinstance(case.body, dict) and isinstance(case.body.get("wait_s"), int | float):
            case.body["wait_s"] = 0
        try:
            answer = send(http, case, operation.path in ENDLESS)
        except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError):
            return  # cannot be said in HTTP at all
        assert answer.status_code < 500 or answer.status_code in allowed, answer.text
        if answer.is_error and answer.request.method != "HEAD" and answer.headers.get("content-type") == "application/problem+json":
            assert answer.json()["code"] in CONTRACT["errors"]

    ask()
    assert http.get("/healthz").status_code == 200

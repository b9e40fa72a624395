"""The small parts of the HTTP side."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import inspect
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_server.api import tenants as tenants_module
from sandbox_server.api.body import check_count, check_depth, check_keys, without_escapes
from sandbox_server.api.contract.render import dumps
from sandbox_server.api.limits import Limits
from sandbox_server.api.problems import STATUS_OF, problem_of
from sandbox_server.api.routes.calls import ResultLines
from sandbox_server.api.tenants import Tenant, Tenants
from sandbox_server.core import errors
from sandbox_server.core.errors import InvalidRequest, NoCapacity, PoolServiceError, Unauthorized
from sandbox_server.core.execution import Fault, Reason, Result
from sandbox_server.dispatch.batch import Batch
from sandbox_server.dispatch.limits.response_budget import ResponseBudget
from sandbox_server.state_dir import StateDir, StateDirError
from sandbox_server.telemetry import JsonFormatter, Telemetry, TextFormatter, request_fields


def every_error() -> list[type[PoolServiceError]]:
    return [one for _, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, PoolServiceError) and one is not PoolServiceError]


def test_every_error_has_a_status_and_every_status_an_error() -> None:
    assert {one.code for one in every_error()} == set(STATUS_OF)


@pytest.mark.parametrize("error", every_error())
def test_every_error_is_a_whole_problem_document(error: type[PoolServiceError]) -> None:
    problem = problem_of(error(), "r-1")

    document = json.loads(problem.body)
    assert (document["code"], document["status"], document["request_id"]) == (error.code, problem.status, "r-1")
    assert document["detail"] == (error.__doc__ or "").strip()
    assert ("retry-after" in problem.headers) == (problem.status in (429, 503))


def test_an_errors_members_go_into_the_document_and_never_over_it() -> None:
    problem = problem_of(NoCapacity("full", queue_position=3, status=200, code="fine", retry_after_s=2.4), "r-1")

    document = json.loads(problem.body)
    assert (document["queue_position"], document["status"], document["code"]) == (3, 503, "no_capacity")
    assert problem.headers["retry-after"] == "2"


@pytest.mark.parametrize("depth", [1, 2, 64])
def test_depth_is_counted_exactly(depth: int) -> None:
    nested: Any = 1
    for level in range(depth):
        nested = [nested] if level % 2 else {"a": nested}

    check_depth(nested, Limits(json_depth=depth))
    if depth > 1:
        with pytest.raises(InvalidRequest):
            check_depth(nested, Limits(json_depth=depth - 1))


def test_a_scalar_has_no_depth() -> None:
    check_depth("[[[[", Limits(json_depth=1))


@pytest.mark.parametrize(
    ("body", "values"),
    [
        (b"[1, 2, 3]", 3),
        (b'{"a": {}, "b": [[]]}', 5),
        (b'{"a": ",[{,[{", "b": 1}', 2),
        (rb'["\\", "\",\",\\\",[", "\\\\"]', 3),
        (rb'{"x":"\":","y":[{"":[[]]},{"":[[]]}]}', 10),
    ],
)
def test_values_are_counted_outside_of_texts(body: bytes, values: int) -> None:
    bare = without_escapes(body)

    check_count(bare, Limits(json_values=values))
    check_keys(body, bare, json.loads(body))
    with pytest.raises(InvalidRequest, match="json_values"):
        check_count(bare, Limits(json_values=values - 1))


@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30))
def test_no_value_escapes_the_count(document: Any) -> None:
    def count(value: Any) -> int:
        children = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()
        return (isinstance(value, dict | list)) + max(0, len(children) - 1) + sum(count(child) for child in children)

    body = json.dumps(document).encode()
    bare, values = without_escapes(body), count(document)

    check_count(bare, Limits(json_values=max(values, 1)))
    check_keys(body, bare, document)
    if values > 1:
        with pytest.raises(InvalidRequest, match="json_values"):
            check_count(bare, Limits(json_values=values - 1))


def test_a_long_text_full_of_commas_is_one_value() -> None:
    check_count(without_escapes(json.dumps({"content": '1,"2",[3]\n' * 500_000}).encode()), Limits())


def test_text_that_cannot_be_utf_8_is_replaced_and_numbers_beyond_json_are_floats() -> None:
    assert json.loads(dumps({"a\udc80": ["\ud800b", 1 << 70], "c": (1, {2}), "d": True})) == {"a�": ["�b", float(1 << 70)], "c": [1, [2]], "d": True}


TENANTS = Tenants([Tenant(name="a", token="token-a"), Tenant(name="b", token="token-b")])


@pytest.mark.parametrize("header", [b"Bearer token-b", b"bearer token-b", b"Bearer  token-b "])
def test_a_token_is_its_tenants(header: bytes) -> None:
    assert TENANTS.authenticate(header).name == "b"


@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer ", b"Basic token-b", b"token-b", b"Bearer token", b"Bearer token-bb", b"Bearer \xff"])
def test_anything_else_is_nobodys(header: bytes | None) -> None:
    with pytest.raises(Unauthorized):
        TENANTS.authenticate(header)


@pytest.mark.parametrize("token", [b"token-a", b"token-b", b"nobodys", b"t" * 10_000])
def test_a_token_takes_the_same_comparisons_whoevers_it_is(token: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    def compare(known: bytes, asked: bytes) -> bool:
        compared.append(len(asked))
        return hmac.compare_digest(known, asked)

    monkeypatch.setattr(tenants_module, "hmac", SimpleNamespace(compare_digest=compare))
    with contextlib.suppress(Unauthorized):
        TENANTS.tenant_of_token(token)

    assert compared == [32, 32], "each known token once, over digests of one length"


def test_an_open_door_asks_for_nothing() -> None:
    assert Tenants([Tenant(name="local", admin=True)], authentication_disabled=True).authenticate(None).admin


def test_tenants_do_not_show_their_tokens() -> None:
    assert "token-a" not in repr(TENANTS.all)


def test_a_state_folder_has_one_service_at_a_time(tmp_path: Path) -> None:
    first = StateDir.open(tmp_path / "deep" / "state")
    with pytest.raises(StateDirError, match="another service"):
        StateDir.open(tmp_path / "deep" / "state")

    first.unlock()

    StateDir.open(tmp_path / "deep" / "state").unlock()


def test_a_state_folder_that_cannot_be_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(StateDirError, match="SANDBOX_STATE_DIR"):
        StateDir.open(tmp_path / "file" / "state")


def test_the_token_is_made_once_and_private(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path / "state")

    token = state.token()

    assert len(token) >= 32
    assert state.token() == token
    assert state.owner() == state.owner()
    assert state.token_path.stat().st_mode & 0o777 == 0o600
    state.unlock()


def test_server_json_is_there_while_the_service_is(tmp_path: Path) -> None:
    state = StateDir.open(tmp_path / "state")
    state.write_server_file("http://127.0.0.1:1")
    assert json.loads((tmp_path / "state" / "server.json").read_text())["url"] == "http://127.0.0.1:1"

    state.unlock()

    assert not (tmp_path / "state" / "server.json").exists()


async def test_an_empty_line_says_that_the_service_is_still_there() -> None:
    batch = Batch(1, ResponseBudget().nothing_reserved("alice"))
    sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sending = asyncio.create_task(ResultLines(batch, 60.0, heartbeat_s=0.01)({}, asyncio.Event().wait, sent.put))  # type: ignore[arg-type]
    assert (await sent.get())["status"] == 200
    assert (await sent.get())["body"] == b"\n"

    batch.deliver_result(0, Result(call_id="c", lease_id="l", reason=Reason.EXIT, fault=Fault.NONE, exit_code=0))

    while (body := (await sent.get())["body"]) == b"\n":
        pass
    assert json.loads(body)["call_id"] == "c"
    await sending
    assert await sent.get() == {"type": "http.response.body", "body": b"", "more_body": False}


def a_record(**extra: object) -> logging.LogRecord:
    record = logging.LogRecord("x.y", logging.INFO, "f", 1, "hello %s", ("you",), None)
    vars(record).update(extra)
    return record


def test_a_log_line_is_one_json_object_with_the_fields_of_its_request() -> None:
    token = request_fields.set({"request_id": "r-1", "tenant": "a"})

    line = JsonFormatter().format(a_record(lease_id="l-1", path=Path("/x")))

    request_fields.reset(token)
    document = json.loads(line)
    assert "\n" not in line
    assert {name: document[name] for name in ("level", "logger", "message", "request_id", "tenant", "lease_id", "path")} == {
        "level": "info", "logger": "x.y", "message": "hello you", "request_id": "r-1", "tenant": "a", "lease_id": "l-1", "path": "/x",
    }  # fmt: skip


def test_an_exception_is_in_the_line() -> None:
    try:
        raise ValueError("why")
    except ValueError:
        record = a_record()
        record.exc_info = sys.exc_info()

    assert "ValueError: why" in json.loads(JsonFormatter().format(record))["exception"]
    assert "ValueError: why" in TextFormatter().format(record)
    assert "lease_id=l-1" in TextFormatter().format(a_record(lease_id="l-1"))


def test_an_unknown_tool_is_no_label() -> None:
    telemetry = Telemetry()
    for n in range(100):
        telemetry.count_call(pool="p", tool=f"tool-{n}", reason="lease_lost", fault="ambiguous", duration_s=0.0, overhead_s=None)

    assert telemetry.value("sandbox_exec_total", pool="p", tool="other", reason="lease_lost", fault="ambiguous") == 100.0
    assert b"tool-7" not in telemetry.text([])

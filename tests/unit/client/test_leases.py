"""Tests of leases: a lease is renewed during its block and released at its end, and its loss is reported."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from env_client import errors
from tests.support.scripted_responses import Script, a_lease, a_result, problem

RELEASED = {"released": ["l-1"], "unknown": []}


class Service:
    """A service that accepts acquires, calls and releases, and records which it received."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, httpx.Response] = {}

    def __call__(self, request: httpx.Request) -> httpx.Response:
        verb = request.url.path.rpartition("/")[2]
        self.asked.append(verb)
        if verb in self.answers:
            return self.answers[verb]
        made: dict[str, Any] = {
            "acquire": {"leases": [a_lease("l-1"), a_lease("l-2")], "waited_s": 0.0},
            "exec": a_result("c-1", output="hello"),
            "release": RELEASED,
            "renew": {"leases": [a_lease("l-1", expires_at=77.0)], "lost": []},
        }
        return httpx.Response(200, json=made[verb])


@pytest.fixture
def service(script: Script) -> Service:
    made = Service()
    script.steps = [made]
    return made


def test_a_lease_lasts_as_long_as_its_block(client: Any, service: Service, script: Script) -> None:
    service.answers["acquire"] = httpx.Response(200, json={"leases": [a_lease()], "waited_s": 0.0})

    with client.lease("p", ttl_s=60) as lease:
        assert lease.bash("echo hello", cwd="/tmp", timeout_s=5).output == "hello"
        assert (lease.lease_id, lease.lost) == ("l-1", None)

    assert service.asked == ["acquire", "exec", "release"]
    acquired, executed, released = script.bodies()
    assert (acquired["pool"], acquired["count"], acquired["ttl_s"]) == ("p", 1, 60)
    assert (executed["tool"], executed["args"], executed["timeout_s"]) == ("bash", {"command": "echo hello", "cwd": "/tmp"}, 5)
    assert released == {"lease_ids": ["l-1"], "reset_workspace": True}


def test_a_gang_is_given_back_together(client: Any, service: Service, script: Script) -> None:
    with client.gang(2) as leases:
        assert [lease.lease_id for lease in leases] == ["l-1", "l-2"]

    assert script.bodies()[-1]["lease_ids"] == ["l-1", "l-2"]


def test_it_is_given_back_when_the_block_fails(client: Any, service: Service) -> None:
    with pytest.raises(ZeroDivisionError), client.gang(2):
        raise ZeroDivisionError

    assert service.asked == ["acquire", "release"]


def test_a_failed_release_does_not_hide_what_went_wrong_before(client: Any, service: Service) -> None:
    service.answers["release"] = problem(500, "internal")

    with pytest.raises(ZeroDivisionError) as caught, client.gang(2):
        raise ZeroDivisionError
    assert caught.value.__notes__ == ["the leases l-1, l-2 could not be released either: because of internal [500 internal]"]


def test_a_failed_release_is_raised(client: Any, service: Service) -> None:
    service.answers["release"] = problem(500, "internal")

    with pytest.raises(errors.InternalError), client.gang(2):
        pass


def test_a_lost_lease_is_refused_without_asking(client: Any, service: Service) -> None:
    with client.gang(2) as (lease, other):
        lease.record_loss(errors.SandboxLost("its agent died", status=410))
        with pytest.raises(errors.SandboxLost, match="its agent died"):
            lease.bash("true")
        with pytest.raises(errors.SandboxLost):
            lease.get_file("a")
        with pytest.raises(errors.SandboxLost):
            lease.stream_file("a")
        assert other.bash("true").success

    assert service.asked == ["acquire", "exec", "release"]


@pytest.mark.parametrize(("status", "code"), [(410, "lease_lost"), (410, "sandbox_lost"), (404, "lease_not_found")])
def test_an_answer_that_it_is_lost_is_remembered(client: Any, service: Service, status: int, code: str) -> None:
    service.answers["exec"] = problem(status, code)

    with client.gang(2) as (lease, _):
        for _ in range(2):
            with pytest.raises(errors.ServiceError) as caught:
                lease.bash("true")
            assert caught.value.code == code
        assert lease.lost.code == code

    assert service.asked == ["acquire", "exec", "release"]


def test_renewing_brings_it_up_to_date(client: Any, service: Service) -> None:
    with client.gang(2) as (lease, _):
        assert lease.renew(60).expires_at == 77.0
        assert lease.info.expires_at == 77.0


def test_renewing_a_lost_one_is_an_error(client: Any, service: Service) -> None:
    service.answers["renew"] = httpx.Response(200, json={"leases": [], "lost": [{"lease_id": "l-1", "code": "lease_lost", "detail": "it expired"}]})

    with client.gang(2) as (lease, _):
        with pytest.raises(errors.LeaseLost, match="it expired"):
            lease.renew()
        assert lease.lost is not None


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"command": ["ls"]}, "command"),
        ({"command": "ls", "cwd": 7}, "cwd"),
        ({"command": "cat", "stdin": b"bytes"}, "stdin"),
        ({"command": "env", "env": ["A=1"]}, "env"),
        ({"command": "env", "env": {"A": 1}}, "env.A"),
        ({"command": "ls", "timeout_s": "soon"}, "timeout_s"),
    ],
)
def test_a_helper_refuses_what_is_not_of_its_type_without_asking(client: Any, service: Service, arguments: dict[str, Any], field: str) -> None:
    with client.gang(2) as (lease, _), pytest.raises(errors.InvalidRequest, match="must be") as raised:
        lease.bash(**arguments)

    assert raised.value.extra["field"] == field
    assert "exec" not in service.asked


INVALID: dict[str, Any] = {"success": False, "exit_code": None, "reason": "invalid_args"}


@pytest.mark.parametrize(
    ("fault", "field", "error"),
    [("infra", "timeout_s", "timeout_s: at most 3600"), ("infra", None, "odd"), ("policy", "tool", "there is no tool 'bsah'")],
)
def test_a_call_that_a_program_got_wrong_is_an_error(client: Any, service: Service, fault: str, field: str | None, error: str) -> None:
    result = a_result("c-1", **INVALID, fault=fault, error=error, metadata={"evidence": {"ran": False, **({"field": field} if field else {})}})
    events = f"event: result\ndata: {json.dumps(result)}\n\n"
    for answer in (httpx.Response(200, json=result), httpx.Response(200, text=events)):
        service.answers["exec"] = answer
        with client.gang(2) as (lease, _):
            with pytest.raises(errors.InvalidRequest, match=error) as raised:
                list(lease.exec_events("bsah", {})) if answer.text == events else lease.exec("bsah", {})
            assert lease.lost is None

        assert raised.value.extra.get("field") == field
        assert raised.value.extra["call_id"] == "c-1"


def test_what_a_policy_got_wrong_is_a_result(client: Any, service: Service) -> None:
    said = {**INVALID, "fault": "policy", "error": "command: must be text", "metadata": {"evidence": {"ran": False, "field": "args"}}}
    service.answers["exec"] = httpx.Response(200, json=a_result("c-1", **said))

    with client.gang(2) as (lease, _):
        assert lease.exec("bash", {"command": 7}).fault == "policy"
        assert lease.bash("x").fault == "policy"


def test_a_call_for_a_batch_knows_its_lease(client: Any, service: Service) -> None:
    with client.gang(2) as (lease, _):
        call = lease.call("bash", {"command": "ls"}, timeout_s=3)

    assert (call.lease_id, call.tool, call.timeout_s) == ("l-1", "bash", 3)
    assert call.call_id.startswith("c-")

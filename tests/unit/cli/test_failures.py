"""Tests of failure messages: every error of the client and every missing package has a next step."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from env_client import errors
from env_client.cli.failures import NEXT_STEPS, Failure, failure_document, failure_from_error, failure_from_errors, next_step_for_field

RAISED = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, errors.SandboxError) and found is not errors.SandboxError]


@pytest.mark.parametrize("kind", RAISED)
def test_every_error_says_what_to_do_next(kind: type[errors.SandboxError]) -> None:
    failure = failure_from_error(kind("it is so"))

    assert failure.sentence == "it is so"
    assert failure.next_step
    assert failure.code == kind.code


def test_no_step_is_for_an_error_that_is_none() -> None:
    assert set(NEXT_STEPS) <= set(RAISED)


def test_what_failed_inside_is_found_by_its_request() -> None:
    failure = failure_from_error(errors.InternalError("The service failed.", status=500, request_id="r-1"))

    assert failure.sentence == "The service failed (request r-1)"


def test_as_a_document() -> None:
    error = errors.NoCapacity("none free", status=503, request_id="r-1", extra={"queue_position": 3})

    told = failure_document(failure_from_error(error), error)["error"]

    assert (told["code"], told["detail"], told["status"], told["queue_position"]) == ("no_capacity", "none free", 503, 3)


def test_what_could_be_done_all_the_same_is_in_the_same_document() -> None:
    failure = Failure("so", "do that", "some_code", {"released": ["l-1"]})

    assert failure_document(failure) == {"released": ["l-1"], "error": {"code": "some_code", "detail": "so", "next_step": "do that"}}


def test_several_errors_are_combined_with_the_next_step_of_the_first() -> None:
    lost = {"a": errors.LeaseLost("a has ended"), "b": errors.ConnectFailed("nobody answers")}

    failure = failure_from_errors(lost, {})

    assert (failure.sentence, failure.next_step, failure.code) == ("a has ended\nnobody answers", NEXT_STEPS[errors.LeaseLost], "lease_lost")


@pytest.mark.parametrize(
    ("field", "step"), [("ttl_s", "correct `--ttl`"), ("labels.a", "correct `--label`"), ("path", "`ls` and `cp` reach /workspace"), ("else", "")]
)
def test_a_field_names_its_option(field: str, step: str) -> None:
    assert next_step_for_field(field).startswith(step)
    assert bool(next_step_for_field(field)) is bool(step)


def test_a_limit_says_itself_what_to_do() -> None:
    error = errors.InvalidRequest("path: too many entries: list the folders below it", extra={"field": "path", "limit": "list_entries"})

    assert failure_from_error(error).next_step == NEXT_STEPS[errors.InvalidRequest]


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_what_is_not_installed_is_named_with_how_to_get_it(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['sandbox', 'pools']; from env_client.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)

    assert (done.returncode, done.stdout) == (125, "")
    assert done.stderr == f"sandbox: the command line needs {missing}, which is not installed\n  in a clone of the repository: pip install '.[cli]'\n"


@pytest.mark.parametrize(("address", "is_why"), [("http://h:1/v1", True), ("http://h:1/v1/", True), ("http://h:1", False), ("http://h:1/xv1", False)])
def test_an_address_that_ends_in_v1_gets_its_own_next_step(monkeypatch: pytest.MonkeyPatch, address: str, is_why: bool) -> None:
    monkeypatch.setenv("SANDBOX_URL", address)

    assert (failure_from_error(errors.RouteNotFound("no route")).next_step == "leave /v1 out of SANDBOX_URL, as in http://h:1") is is_why

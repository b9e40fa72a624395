"""The results that agents report are checked, and every result has its fault and evidence."""

from __future__ import annotations

from typing import Any

import pytest

from sandbox_server.core.execution import FAULT_OF, FAULTS_OF, Fault, Reason, Result
from sandbox_server.dispatch.result_records import identity_of
from sandbox_server.dispatch.results import agent_result, invalid_field_result, service_result
from sandbox_server.link.call_messages import read_result_message
from tests.unit.dispatch.conftest import call

GOOD: dict[str, Any] = {
    "reason": "exit",
    "exit_code": 0,
    "lens": [3],
    "output_bytes": 3,
    "started_at": 1.0,
    "duration_s": 0.5,
    "cpu_s": 0.1,
    "max_rss_bytes": 10,
}


def result_of(meta: dict[str, Any]) -> Result:
    """The result of a call whose agent sends this message, and `abc` as its output."""
    return agent_result(call("a", "true"), read_result_message(meta, b"abc"))


def test_a_good_answer_is_the_result() -> None:
    result = result_of(GOOD)

    assert (result.reason, result.exit_code, result.output, result.output_bytes, result.success) == (Reason.EXIT, 0, b"abc", 3, True)


@pytest.mark.parametrize("lens", [[2], [1, 1], [1, 1, 1], [-1, 4], ["3"], "3", [True, 2], None])
def test_output_that_does_not_add_up_is_a_backend_error(lens: object) -> None:
    assert result_of({**GOOD, "lens": lens}).reason is Reason.BACKEND_ERROR


@pytest.mark.parametrize("number", [-1, 1e400, float("nan"), "1", None, True, 1 << 60, []])
def test_a_figure_that_is_none_counts_as_nothing(number: object) -> None:
    result = result_of({**GOOD, "duration_s": number, "output_bytes": number, "max_rss_bytes": number})

    assert (result.duration_s, result.output_bytes, result.max_rss_bytes) == (0.0, 0, 0)


def test_a_file_tool_that_did_its_work_is_a_success() -> None:
    assert result_of({**GOOD, "exit_code": None, "tool_ok": True}).success


def test_an_exit_has_no_error_sentence_and_a_long_one_is_cut() -> None:
    assert result_of({**GOOD, "error": "said anyway"}).error == ""
    assert len(result_of({**GOOD, "reason": "tool_error", "error": "x" * 10_000}).error) == 4000


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_its_fault(reason: Reason) -> None:
    assert result_of({**GOOD, "reason": reason.value}).fault is FAULT_OF[reason]


PROVEN = {
    ("sandbox_lost", "own_work"): Fault.POLICY,
    ("sandbox_lost", "ambiguous"): Fault.AMBIGUOUS,
    ("timeout", "starved"): Fault.AMBIGUOUS,
    ("no_output_timeout", "starved"): Fault.AMBIGUOUS,
    ("oom", "ambiguous"): Fault.AMBIGUOUS,
    ("resource_limit", "ambiguous"): Fault.AMBIGUOUS,
}


@pytest.mark.parametrize("key", ["own_work", "starved", "ambiguous", "fault"])
@pytest.mark.parametrize("reason", list(Reason))
def test_another_fault_than_the_reasons_own_needs_the_proof_that_is_agreed_on(reason: Reason, key: str) -> None:
    for proof in (True, {"share": 1.0, "got": 0.2}):
        said = {**GOOD, "reason": reason.value, "metadata": {"evidence": {key: proof}}}

        assert result_of(said).fault is PROVEN.get((reason.value, key), FAULT_OF[reason])


@pytest.mark.parametrize("proof", [False, None, 0, 1, "yes", "", {}, [], [True]])
@pytest.mark.parametrize(("reason", "key"), PROVEN)
def test_what_is_no_proof_leaves_the_fault_as_it_is(reason: str, key: str, proof: object) -> None:
    said = {**GOOD, "reason": reason, "metadata": {"evidence": {key: proof}}}

    assert result_of(said).fault is FAULT_OF[Reason(reason)]


def test_a_lost_sandbox_that_was_its_own_works_doing_is_the_policys_whatever_else_is_said() -> None:
    said = {**GOOD, "reason": "sandbox_lost", "metadata": {"evidence": {"ambiguous": True, "own_work": True}}}

    assert result_of(said).fault is Fault.POLICY


@pytest.mark.parametrize("fault", ["none", "infra", "ambiguous", "nobody", None, 7])
@pytest.mark.parametrize("reason", list(Reason))
def test_an_agent_has_no_say_in_whose_fault_it_was(reason: Reason, fault: object) -> None:
    said = {**GOOD, "reason": reason.value, "fault": fault, "metadata": {"fault": fault, "evidence": {"fault": fault}}}

    assert result_of(said).fault is FAULT_OF[reason]


def test_every_fault_that_a_result_may_have_is_in_the_table_and_no_other() -> None:
    possible = {(reason, fault) for reason, faults in FAULTS_OF.items() for fault in faults[1:]}

    assert possible == {(Reason(reason), fault) for (reason, _), fault in PROVEN.items()} | {(Reason.INVALID_ARGS, Fault.INFRA)}
    assert invalid_field_result(call("a", "true"), "timeout_s", "timeout_s: too long").fault is Fault.INFRA


def test_the_identity_is_the_tool_and_the_arguments_in_any_order() -> None:
    one = call("a", "true")

    assert identity_of(one) == identity_of(call("b", "true", "other", timeout_s=9.0))
    assert identity_of(one) != identity_of(call("a", "false"))


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"below": value}
    return value


@pytest.mark.parametrize(
    "odd",
    [
        {"metadata": nested(400)},
        {"metadata": {"list": [[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]}},
        {"metadata": {"long": "x" * 70_000}},
        {"metadata": {"number": 1 << 70}},
        {"metadata": {"text": "\ud800"}},
        {"exit_code": 1 << 70},
        {"exit_code": -1},
        {"exit_code": 256},
        {"exit_code": True},
        {"exit_code": "0"},
    ],
)
def test_what_could_not_be_answered_costs_only_its_own_call(odd: dict[str, Any]) -> None:
    result = result_of({**GOOD, **odd})

    assert result.reason is Reason.BACKEND_ERROR
    assert result.metadata["may_have_run"] is True
    assert result.metadata["evidence"] == {"detail": result.error}


@pytest.mark.parametrize("reason", [reason for reason in Reason if reason is not Reason.EXIT])
def test_every_verdict_but_an_exit_says_what_it_rests_on(reason: Reason) -> None:
    bare = result_of({**GOOD, "reason": reason.value, "error": "it broke", "metadata": {}})
    proven = result_of({**GOOD, "reason": reason.value, "metadata": {"evidence": {"signal": "SIGKILL"}}})

    assert bare.metadata["evidence"] == {"detail": "it broke"}
    assert proven.metadata["evidence"] == {"signal": "SIGKILL"}
    assert service_result(call("a", "true"), reason, "we know").metadata["evidence"] == {"detail": "we know"}

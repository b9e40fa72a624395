"""The journal, which makes sure that a call runs at most once, and the identity of calls."""

from __future__ import annotations

import pytest

from sandbox_server.agent.execution.journal import CallOutcome, Journal, call_identity


def _outcome(call_id: str, reason: str) -> CallOutcome:
    return CallOutcome(call_id, reason, 0, "", 0.0, 0.0, 0.0, 0, False, {}, ())


def test_identity_does_not_depend_on_the_order_of_keys() -> None:
    assert call_identity("bash", {"command": "x", "env": {"A": "1", "B": "2"}}) == call_identity("bash", {"env": {"B": "2", "A": "1"}, "command": "x"})


@pytest.mark.parametrize(
    ("tool", "args"),
    [
        ("terminal", {"command": "x"}),
        ("bash", {"command": "y"}),
        ("bash", {"command": "x", "cwd": None}),
        ("bash", {"command": ["x"]}),
        ("bash", {"command": {"x": 1}}),
        ("bash", {"command": "\udc80"}),
    ],
)
def test_calls_that_differ_have_different_identities(tool: str, args: dict[str, object]) -> None:
    assert call_identity(tool, args) != call_identity("bash", {"command": "x"})


def test_identity_depends_on_the_value_and_not_on_the_object() -> None:
    command = "".join(["ec", "ho"])

    assert call_identity("bash", {"command": command}) == call_identity("bash", {"command": "echo"})


def test_an_outcome_is_recorded_unless_the_call_may_be_sent_again() -> None:
    journal = Journal()
    for call_id, reason in (("a", "exit"), ("b", "not_implemented"), ("c", "timeout")):
        journal.record_start(call_id, b"", object())
        journal.record_outcome(call_id, _outcome(call_id, reason))
    running = object()
    journal.record_start("d", b"", running)

    assert journal.running_calls() == [running]
    assert journal.get_entry("b") is None
    entry = journal.get_entry("c")
    assert entry is not None
    assert entry.outcome is not None
    assert entry.outcome.reason == "timeout"

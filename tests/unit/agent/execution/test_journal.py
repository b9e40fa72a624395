"""A call runs at most once: its identity, and what is remembered of it."""

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
def test_other_calls_have_other_identities(tool: str, args: dict[str, object]) -> None:
    assert call_identity(tool, args) != call_identity("bash", {"command": "x"})


def test_identity_is_of_the_value_not_of_the_object() -> None:
    command = "".join(["ec", "ho"])

    assert call_identity("bash", {"command": command}) == call_identity("bash", {"command": "echo"})


def test_a_verdict_is_kept_and_what_may_be_asked_again_is_not() -> None:
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

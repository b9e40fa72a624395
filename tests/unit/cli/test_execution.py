"""Tests of how a call's output and result are reported, with a client that returns prepared results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from env_client.cli import signals
from env_client.cli.command_line import CommandLine
from env_client.cli.commands import leases
from env_client.cli.commands.leases import SLOT_NOT_RELEASED, _run_in_leased_slot
from env_client.cli.execution import execute_command, failure_for_lost_result, report_result
from env_client.cli.failures import Failure
from env_client.cli.printer import Printer
from env_client.client import SandboxClient
from env_client.errors import ConnectFailed, ConnectionLost, NoCapacity
from env_client.values import Output, Reason, Result

COMMAND = CommandLine(["true"], None, [])


def a_result(reason: str = "exit", exit_code: int | None = 0, **fields: Any) -> Result:
    return Result(call_id="c", lease_id="l", success=False, reason=reason, fault="none", exit_code=exit_code, **fields)


def test_output_that_a_slot_could_not_keep_is_counted_and_the_exit_code_is_the_commands(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    def events(*args: Any, **options: Any) -> Iterator[Output | Result]:
        yield Output(data=b"begin", offset=5)
        yield a_result(exit_code=3, output_bytes=5_000_005)

    printer = Printer()
    result = execute_command(cast(SandboxClient, SimpleNamespace(exec_events=events)), "l", COMMAND, {}, printer, forward_input=False, cancel=True)

    assert report_result(result, COMMAND, printer) == 3
    out, err = capfdbinary.readouterr()
    assert out == b"begin"
    assert err.decode() == (
        "sandbox: 5,000,000 bytes of the output are missing: a slot keeps only so much of what a command writes\n"
        "  make the command write to a file in /workspace, and copy the file with `sandbox cp`\n"
    )


@pytest.mark.parametrize(
    ("reason", "own_code", "exit_code"),
    [
        ("exit", 7, 7),
        ("exit", 137, 137),
        ("timeout", None, 124),
        ("no_output_timeout", None, 124),
        ("tool_error", None, 126),
        ("oom", None, 137),
        ("oom", 1, 1),
        ("resource_limit", 153, 153),
        ("cancelled", None, 130),
        *((reason, None, 125) for reason in ("invalid_args", "lease_lost", "sandbox_lost", "backend_error", "call_conflict", "not_implemented")),
    ],
)
def test_how_a_call_ended_is_an_exit_code(reason: str, own_code: int | None, exit_code: int) -> None:
    assert report_result(a_result(reason, own_code, error="so"), COMMAND, Printer()) == exit_code


def test_every_reason_has_an_exit_code() -> None:
    assert all(report_result(a_result(reason, None, error="so"), COMMAND, Printer()) >= 124 for reason in Reason)


@pytest.mark.parametrize(
    ("error", "step"), [("timeout_s: too long", "correct `--timeout`"), ("env: no", "correct `--env`"), ("x: y", "correct the argument, and try")]
)
def test_an_argument_that_is_wrong_names_its_option(capsys: pytest.CaptureFixture[str], error: str, step: str) -> None:
    report_result(a_result("invalid_args", None, error=error), COMMAND, Printer())

    assert step in capsys.readouterr().err


class ClientWithoutRelease:
    """A client whose slots cannot be released."""

    @contextmanager
    def lease(self, pool: str | None, **asked: Any) -> Iterator[SimpleNamespace]:
        if pool == "full":
            raise NoCapacity("none is free")
        yield SimpleNamespace(lease_id="l")
        raise ConnectFailed("the service is gone")


def test_a_slot_that_cannot_be_given_back_costs_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    client = cast(SandboxClient, ClientWithoutRelease())

    assert _run_in_leased_slot(client, None, {"run_id": "r"}, lambda lease_id: a_result(exit_code=4), Printer()).exit_code == 4
    assert "becomes free within five minutes: the service is gone" in capsys.readouterr().err
    with pytest.raises(NoCapacity):
        _run_in_leased_slot(client, "full", {"run_id": "r"}, lambda lease_id: a_result(), Printer())


def test_what_a_second_signal_says_is_known_while_a_slot_is_held() -> None:
    client = cast(SandboxClient, SimpleNamespace(lease=lambda pool, **asked: nullcontext(SimpleNamespace(lease_id="l"))))
    seen: list[str] = []

    def work(lease_id: str) -> Result:
        seen.extend(signals._announcements)
        return a_result()

    _run_in_leased_slot(client, None, {"run_id": "r"}, work, Printer())

    assert (seen, signals._announcements) == ([SLOT_NOT_RELEASED], [])


def test_the_failure_for_a_lost_result_names_the_route_that_has_it() -> None:
    failure = failure_for_lost_result(ConnectionLost("cut"), "l-1", "c-1")

    assert isinstance(failure, Failure)
    assert (failure.sentence, failure.code, failure.document) == ("cut", "connection_lost", {"lease_id": "l-1", "call_id": "c-1"})
    assert "GET /v1/leases/l-1/calls/c-1" in failure.next_step


@pytest.mark.parametrize(("call_id", "extra"), [(None, {}), ("c-1", {"may_have_run": False})])
def test_an_error_before_the_call_was_sent_is_not_changed(call_id: str | None, extra: dict[str, bool]) -> None:
    error = ConnectFailed("nobody", extra=extra)

    assert failure_for_lost_result(error, "l-1", call_id) is error


def test_exec_names_the_call_whose_result_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(*args: Any, **options: Any) -> Iterator[Output | Result]:
        raise ConnectionLost(f"cut, call {options['call_id']}")

    monkeypatch.setattr(leases, "connect_to_service", lambda: nullcontext(SimpleNamespace(exec_events=lost)))
    with pytest.raises(Failure) as caught:
        leases.exec_("l-1", ["true"], no_stdin=True)

    assert caught.value.document is not None
    assert caught.value.document["lease_id"] == "l-1"
    assert caught.value.sentence == f"cut, call {caught.value.document['call_id']}"

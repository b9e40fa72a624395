"""Tests of `--json`: standard output is one document in every case."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.integration.cli.sandbox_command import WAIT_S, SandboxCommand
from tests.support.service import SMALL_POOL, Service, running_service

SECONDS = (f"{31341 + os.getpid()}.{number}" for number in itertools.count(1))
"""The durations for which commands sleep. Each command has its own, so that it can be found among all processes of the machine."""


def the_document(done: subprocess.CompletedProcess[bytes]) -> Any:
    """Return the only document on standard output; any other output is not JSON."""
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    "words",
    [
        ["acquire", "--pool", "nope"],
        ["acquire", "--ttl", "nan"],
        ["acquire", "--count", "1000"],
        ["leases", "extra"],
        ["renew", "l-nope"],
        ["narrow", "--no-network", "l-nope"],
        ["narrow", "l-nope"],
        ["release", "l-nope"],
        ["release", ""],
        ["exec", "l-nope", "--", "true"],
        ["run", "--pool", "nope", "--", "true"],
        ["run", "--timeout", "-1", "--", "true"],
        ["run", "--cwd", "/nope", "--", "true"],
        ["run", "--", "nope"],
        ["cp", "nope", "l-nope:x"],
        ["cp", "l-nope:x", "-"],
        ["cp", "l-nope:x", "here"],
        ["ls", "l-nope"],
        ["port", "l-nope", "8000"],
        ["port", "l-nope", "65536"],
        ["pools", "nope"],
        ["pools", "no/pe"],
        ["sandboxes", "extra"],
        ["drain", "s-nope"],
        ["pool", "apply", "Bad Name", "--set", "max_sandboxes=1"],
        ["pool", "apply", "p", "--set", "nope=1"],
        ["pool", "delete", "nope"],
        ["pool", "verify", "nope"],
        ["doctor", "--bogus"],
    ],
    ids=" ".join,
)
def test_what_fails_is_one_document(sandbox: SandboxCommand, words: list[str]) -> None:
    place = 2 if words[0] == "pool" else 1
    done = sandbox(*words[:place], "--json", *words[place:])

    document = the_document(done)
    assert done.returncode in (125, 126, 127)
    if "reason" in document:  # the document of a call with a result
        assert document["reason"] in ("exit", "tool_error", "invalid_args")
    else:
        assert document["error"]["detail"]
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("words", [["doctor"], ["pools"], ["pools", "--json"]], ids=" ".join)
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://"])
def test_without_a_service_too(alone: SandboxCommand, words: list[str], url: str) -> None:
    done = alone(*words, *([] if "--json" in words else ["--json"]), environ={"SANDBOX_URL": url})

    assert done.returncode == (1 if words == ["doctor"] else 125)
    assert the_document(done)


class TestSomeOfMany:
    def test_what_could_be_released_and_what_not(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("release", "--json", lease, "l-nope")

        document = the_document(done)
        assert done.returncode == 125
        assert (document["released"], document["unknown"], document["error"]["code"]) == ([lease], ["l-nope"], "lease_not_found")

    def test_what_could_be_renewed_and_what_not(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("renew", "--json", "l-no", lease, "l-nope")

        document = the_document(done)
        assert done.returncode == 125
        assert [one["lease_id"] for one in document["leases"]] == [lease]
        assert [(one["lease_id"], one["code"]) for one in document["lost"]] == [("l-no", "lease_not_found"), ("l-nope", "lease_not_found")]
        assert done.stderr.decode().splitlines()[:2] == [
            "sandbox: there is no lease 'l-no', or it is not yours",
            "  there is no lease 'l-nope', or it is not yours",
        ]

    def test_what_could_be_narrowed_and_what_not(self, sandbox: SandboxCommand, lease: str) -> None:
        done = sandbox("narrow", "--no-network", "--json", "l-nope", lease)

        document = the_document(done)
        assert done.returncode == 125
        assert [(one["lease_id"], one["allow_network"]) for one in document["leases"]] == [(lease, False)]
        assert [(one["lease_id"], one["code"]) for one in document["refused"]] == [("l-nope", "lease_not_found")]
        assert document["error"]["code"] == "lease_not_found"

    def test_a_successful_document_has_no_error(self, sandbox: SandboxCommand, lease: str) -> None:
        assert set(sandbox.json("renew", lease)) == {"leases", "lost"}
        assert set(sandbox.json("narrow", "--no-network", lease)) == {"leases", "refused"}
        assert set(sandbox.json("release", lease)) == {"released", "unknown"}


class TestInterrupted:
    @pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    @pytest.mark.parametrize("command", ["exec", "run"])
    def test_what_the_command_wrote_until_then_is_in_the_document(
        self, sandbox: SandboxCommand, lease: str, tmp_path: Path, command: str, number: signal.Signals, code: int
    ) -> None:
        seconds = next(SECONDS)
        with sandbox.started(*(["exec", "--json", lease] if command == "exec" else ["run", "--json"]), *sleeping(seconds)) as process:
            wait_for_the_command(seconds)
            process.send_signal(number)
            told, complaint = process.communicate(timeout=WAIT_S)

        document = json.loads(told)
        assert (process.returncode, complaint) == (code, b"")
        assert (document["reason"], document["fault"], document["output"]) == ("cancelled", "none", "partial\n")

    def test_what_has_no_result_yet_says_so(self, sandbox: SandboxCommand) -> None:
        sandbox.out("pool", "apply", "taken", "-s", "slots_per_sandbox=1", "-s", "max_sandboxes=1", "-s", "on_shutdown=destroy")
        held = sandbox.out("acquire", "-p", "taken", "--wait", "30").strip()
        with sandbox.started("acquire", "--json", "-p", "taken") as process:
            while sandbox.json("pools", "taken")["queue"] != 1:
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            told, _ = process.communicate(timeout=WAIT_S)

        assert process.returncode == 130
        assert json.loads(told) == {"error": {"code": "interrupted", "detail": "ended by SIGINT", "next_step": ""}}
        sandbox.out("release", held)
        sandbox.out("pool", "delete", "taken", "--force")


def sleeping(seconds: str) -> list[str]:
    """Return a command that writes something and sleeps."""
    return ["--", "bash", "-c", f"echo partial; sleep {seconds}"]


def wait_for_the_command(seconds: str) -> None:
    """Wait until the command sleeps in its slot."""
    deadline = time.monotonic() + WAIT_S
    while not any(process.info["cmdline"] == ["sleep", seconds] for process in psutil.process_iter(["cmdline"])):
        assert time.monotonic() < deadline, "it does not run"
        time.sleep(0.02)  # no event reports that a process has started, and each look at all processes takes processor time


@pytest.fixture(scope="module")
def separate_service() -> Iterator[Service]:
    """A service that no other module uses."""
    with running_service({"pools": {"default": {**SMALL_POOL, "slots_per_sandbox": 2, "max_sandboxes": 1}}}) as service:
        yield service


@pytest.fixture
def own_service(separate_service: Service) -> Iterator[Service]:
    """A service that a test can suspend."""
    try:
        yield separate_service
    finally:
        os.kill(separate_service.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("as_json", [False, True])
def test_a_second_ctrl_c_leaves_at_once(own_service: Service, tmp_path: Path, as_json: bool) -> None:
    sandbox = SandboxCommand(own_service.environ, tmp_path)
    seconds = next(SECONDS)
    with sandbox.started("run", *(["--json"] if as_json else []), *sleeping(seconds)) as process:
        wait_for_the_command(seconds)
        if not as_json:
            assert process.stdout is not None
            assert process.stdout.readline() == b"partial\n"
        os.kill(own_service.process.pid, signal.SIGSTOP)
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for the release of the slot
            process.wait(1.0)
        process.send_signal(signal.SIGINT)
        told, _ = process.communicate(timeout=3.0)
        os.kill(own_service.process.pid, signal.SIGCONT)

    assert process.returncode == 130
    assert json.loads(told)["error"]["code"] == "interrupted" if as_json else told == b""


def test_an_output_that_cannot_be_written_is_no_traceback(sandbox: SandboxCommand) -> None:
    with open("/dev/full", "wb") as full, sandbox.started("pools", "--json", stdout=full.fileno()) as process:
        assert process.stderr is not None
        complaint, status = process.stderr.read(), process.wait(WAIT_S)

    assert (status, complaint) == (125, b"sandbox: No space left on device\n  correct the cause, and try again\n")

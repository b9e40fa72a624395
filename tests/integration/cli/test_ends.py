"""Tests of how commands end: running calls are cancelled and slots are released in every case."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.cli.sandbox_command import PROGRAM, WAIT_S, SandboxCommand


def wait_gone(sandbox: SandboxCommand, lease: str, command: str) -> None:
    """Wait until no process of the slot runs this command."""
    look = f"! pgrep -fx {command!r}"
    deadline = time.monotonic() + WAIT_S
    while sandbox("exec", lease, "--", "bash", "-c", look).returncode != 0:
        assert time.monotonic() < deadline, "it still runs"


def test_ctrl_c_cancels_the_call_and_keeps_the_lease(sandbox: SandboxCommand, lease: str) -> None:
    with sandbox.on_terminal("exec", lease, "--", "bash", "-c", "echo started; sleep 31337") as terminal:
        terminal.wait_for(b"started")
        terminal.type(b"\x03")

        assert terminal.end() == 130
    assert "Traceback" not in terminal.text
    wait_gone(sandbox, lease, "sleep 31337")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_releases_the_slot_of_run(sandbox: SandboxCommand, number: signal.Signals, code: int) -> None:
    with sandbox.started("run", "--", "bash", "-c", "echo started; sleep 31338") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        process.send_signal(number)

        assert process.wait(WAIT_S) == code
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert not [row for row in sandbox.json("leases")["leases"] if "31338" in row["labels"].get("command", "")]


def test_ctrl_c_during_the_wait_for_a_slot_leaves_the_queue(sandbox: SandboxCommand) -> None:
    sandbox.out("pool", "apply", "full", "-s", "slots_per_sandbox=1", "-s", "min_sandboxes=1", "-s", "max_sandboxes=1", "-s", 'on_shutdown="destroy"')
    held = sandbox.out("acquire", "-p", "full", "--wait", "30").strip()
    with sandbox.started("run", "-p", "full", "--", "true") as process:
        deadline = time.monotonic() + WAIT_S
        while sandbox.json("pools", "full")["queue"] != 1:
            assert time.monotonic() < deadline, "it does not queue"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 130

    while sandbox.json("pools", "full")["queue"] != 0:
        assert time.monotonic() < deadline, "it still queues"
    sandbox.out("release", held)
    sandbox.out("pool", "delete", "full", "--force")


def test_a_closed_pipe_ends_the_command(sandbox: SandboxCommand, lease: str) -> None:
    line = f"{' '.join(PROGRAM)} exec {lease} -- yes | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=sandbox.environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=WAIT_S, check=False)

    assert (done.stdout, done.stderr) == (b"y\n141\n", b"")
    wait_gone(sandbox, lease, "yes")


@pytest.mark.parametrize("words", [["leases"], ["ls"], ["pools", "--json"]])
def test_a_pipe_without_a_reader_gives_no_traceback(sandbox: SandboxCommand, lease: str, words: list[str]) -> None:
    ours, its = os.pipe()
    os.close(ours)
    words = [*words, lease] if words == ["ls"] else words
    sandbox.out("exec", lease, "--", "touch", "f")
    done = subprocess.run([*PROGRAM, *words], env=sandbox.environ, stdin=subprocess.DEVNULL, stdout=its, stderr=subprocess.PIPE, timeout=WAIT_S, check=False)
    os.close(its)

    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("words", [["--help"], ["nope"], ["exec", "l-nope", "--", "true"], ["doctor"]], ids=" ".join)
def test_the_exit_code_is_the_same_if_standard_error_has_no_reader_either(sandbox: SandboxCommand, words: list[str]) -> None:
    ours, its = os.pipe()
    os.close(ours)
    done = subprocess.run([*PROGRAM, *words], env=sandbox.environ, stdin=subprocess.DEVNULL, stdout=its, stderr=its, timeout=WAIT_S, check=False)
    os.close(its)

    assert done.returncode == 141


def test_ctrl_c_ends_the_service_that_run_started(alone: SandboxCommand, tmp_path: Path) -> None:
    with alone.on_terminal("run", "--", "bash", "-c", "echo started; sleep 31339") as terminal:
        terminal.wait_for(b"started")
        terminal.type(b"\x03")

        assert terminal.end() == 130
    assert "Traceback" not in terminal.text
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_second_ctrl_c_announces_what_is_not_released(alone: SandboxCommand) -> None:
    held = (
        "import os, signal; from env_client.cli.signals import announce_on_forced_exit, interrupt_on_signals\n"
        "with interrupt_on_signals(False), announce_on_forced_exit('so'):\n"
        "    try: os.kill(os.getpid(), signal.SIGINT)\n"
        "    except KeyboardInterrupt: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    done = subprocess.run([sys.executable, "-c", held], env=alone.environ, capture_output=True, timeout=WAIT_S, check=False)

    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"sandbox: so\n")


@pytest.mark.parametrize("module", ["httpx", "rich", "typer"])
@pytest.mark.parametrize("start", [["-m", "env_client.cli"], ["-c", "from env_client.cli import main; main()"]], ids=["module", "script"])
def test_ctrl_c_during_the_imports_gives_no_traceback(alone: SandboxCommand, start: list[str], module: str) -> None:
    (alone.cwd / f"{module}.py").write_text("import sys\nprint('loading', flush=True)\nsys.stdin.read()\n")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, *start, "leases"], env=alone.environ, cwd=alone.cwd, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"loading\n"
        process.send_signal(signal.SIGINT)

        assert process.wait(WAIT_S) == 130
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_killing_run_ends_the_service_that_it_started(alone: SandboxCommand) -> None:
    with alone.with_real_service().started("run", "--", "bash", "-c", "echo started; sleep 31340") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        family = [os.pidfd_open(child.pid) for child in psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        process.wait()

        assert len(family) > 2
        assert all(select.select([one], [], [], WAIT_S)[0] for one in family)
    for one in family:
        os.close(one)

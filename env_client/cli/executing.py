"""One command in a slot: its input, its output as it comes, and its exit code as our own."""

from __future__ import annotations

import os
import select
import shlex
import signal
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from types import FrameType
from typing import Any

from env_client.cli import OWN_FAILURE
from env_client.cli.failures import Failure, Interrupted
from env_client.cli.screen import Screen
from env_client.client import SandboxClient
from env_client.errors import SandboxError
from env_client.messages import new_call_id
from env_client.values import CallOptions, Reason, Result

#: As timeout(1).
TIMED_OUT = 124
#: 128 + SIGKILL, as a process that the kernel killed for its memory.
OUT_OF_MEMORY = 137
#: Input up to so many bytes travels with the call; more of it, or what is no text, goes into a file of the slot first.
SMALL_INPUT_BYTES = 1 << 20
#: When to say that input is waited for, in seconds.
WAIT_NOTE_S = 3.0

_TIMEOUTS = frozenset({Reason.TIMEOUT, Reason.NO_OUTPUT_TIMEOUT})
_NEXT_STEPS: Mapping[str, str] = {
    Reason.TIMEOUT: "`--timeout SECONDS` gives it longer, up to the pool's max_timeout_s",
    Reason.NO_OUTPUT_TIMEOUT: "`--no-output-timeout SECONDS` gives it longer",
    Reason.OOM: "give the pool more slot_memory_mb",
    Reason.RESOURCE_LIMIT: "the pool's spec sets the limits: `sandbox pools NAME`",
    Reason.LEASE_LOST: "`sandbox acquire` takes a new lease",
    Reason.SANDBOX_LOST: "`sandbox acquire` takes a new lease; `sandbox sandboxes` shows what became of it",
    Reason.BACKEND_ERROR: "`sandbox doctor` looks at the service",
    Reason.NOT_IMPLEMENTED: "`sandbox doctor` says what there is",
    Reason.INVALID_ARGS: "see `--help` for what is taken",
}


class CommandLine:
    """A command as the tool `bash` takes it.

    Args:
        words: the program and its arguments; nothing in them means anything to a shell.
        cwd: where it runs.
        env: `NAME=VALUE` pairs.

    Raises:
        Failure: there is no command, or a pair is none.
    """

    def __init__(self, words: Sequence[str], cwd: str | None, env: Sequence[str]) -> None:
        words = words[1:] if words[:1] == ["--"] else words
        if not words:
            raise Failure("there is no command to run", "give one after `--`: … -- ls -la")
        if words[0].startswith("-"):
            raise Failure(f"{words[0]!r} stands where the command should be", "options go first, and the command after `--`: … -- ls -la")
        self.text = shlex.join(words)
        self.cwd = cwd
        self.env = dict(_pair(one) for one in env)

    def args(self, stdin: str | None, input_path: str | None) -> dict[str, Any]:
        """The arguments of the tool."""
        quoted = shlex.quote(input_path or "")
        text = self.text if input_path is None else f"exec <{quoted} && rm -f {quoted} && {self.text}"
        given: dict[str, Any] = {"command": text, "cwd": self.cwd, "env": self.env or None, "stdin": stdin}
        return {name: value for name, value in given.items() if value is not None}


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or (not equals and name not in os.environ):
        raise Failure(f"--env takes NAME=VALUE, not {text!r}", "or NAME alone, for a variable that is set here")
    return name, value if equals else os.environ[name]


def execute(client: SandboxClient, lease_id: str, command: CommandLine, options: CallOptions, screen: Screen, *, forward_input: bool, cancel: bool) -> Result:
    """Run a command in a slot; its output goes to standard output as it comes.

    Args:
        client: of the service.
        lease_id: in whose slot.
        command: what to run.
        options: its deadlines.
        screen: prints the result where that is asked for as JSON.
        forward_input: give it this process's standard input, where that is no terminal.
        cancel: whether to cancel the call when this process is interrupted.
    """
    stdin, input_path = _forward(client, lease_id, screen) if forward_input else (None, None)
    call_id = new_call_id()
    options["call_id"] = call_id
    args = command.args(stdin, input_path)
    try:
        if screen.as_json:
            result = client.exec(lease_id, "bash", args, **options)
            screen.document(result)
            return result
        return _stream(client, lease_id, args, options)
    except (KeyboardInterrupt, BrokenPipeError):
        if cancel:
            try:
                client.cancel(lease_id, call_id)
            except SandboxError as error:
                screen.note(f"the command could not be cancelled and ends at its timeout: {error.detail}")
        raise


def _stream(client: SandboxClient, lease_id: str, args: Mapping[str, Any], options: CallOptions) -> Result:
    # All of the output comes with the events, byte for byte; the result need not carry it once more.
    options |= {"encoding": "base64", "output_limit_bytes": 0}
    written = 0
    for item in client.exec_events(lease_id, "bash", args, **options):
        if isinstance(item, Result):
            _check_whole(item, written)
            return item
        sys.stdout.buffer.write(item.data)
        sys.stdout.buffer.flush()
        written += len(item.data)
    raise AssertionError("a stream of a call ends with its result, or raises")


def _check_whole(result: Result, written: int) -> None:
    """What is missing in the middle of a pipe must not pass for success."""
    if written < result.output_bytes:
        sentence = f"the command wrote {result.output_bytes} bytes, of which {written} came: a slot keeps only so much"
        raise Failure(sentence, "have it write to a file in /workspace, and copy that with `sandbox cp`", "output_lost")


def conclude(result: Result, screen: Screen) -> int:
    """Say how a call ended where it was not by itself; returns the exit code that stands for it."""
    if result.reason == Reason.EXIT:
        return OWN_FAILURE if result.exit_code is None else result.exit_code
    screen.failure(Failure(f"{result.error or 'the command did not end by itself'} [{result.reason}]", _NEXT_STEPS.get(result.reason, "")))
    if result.reason in _TIMEOUTS:
        return TIMED_OUT
    if result.reason == Reason.CANCELLED:
        return 128 + signal.SIGINT
    if result.reason in (Reason.OOM, Reason.RESOURCE_LIMIT):
        return OUT_OF_MEMORY if result.exit_code is None else result.exit_code
    return OWN_FAILURE


def _forward(client: SandboxClient, lease_id: str, screen: Screen) -> tuple[str | None, str | None]:
    """Standard input as an argument, or as a file of the slot; neither where it is a terminal or closed."""
    try:
        if stat.S_ISCHR(os.fstat(0).st_mode):  # a terminal, or /dev/null
            return None, None
    except OSError:
        return None, None
    chunks = _input(screen)
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) > SMALL_INPUT_BYTES:
            break
    else:
        try:
            return head.decode(), None
        except UnicodeDecodeError:
            pass
    input_path = f"/tmp/.input-{new_call_id()}"
    client.put_file(lease_id, input_path, chain([head], chunks), mode=0o600)
    return None, input_path


def _input(screen: Screen) -> Iterator[bytes]:
    if not select.select([0], [], [], WAIT_NOTE_S)[0]:
        screen.note("waiting for standard input to end; --no-stdin runs the command without it")
    while chunk := os.read(0, 1 << 16):
        yield chunk


@contextmanager
def ending_by_signal() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, so that what was taken is given back."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    before: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

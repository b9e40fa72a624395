"""One command in a slot: its input, its output as it comes, and its exit code as our own."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from env_client.cli import OWN_FAILURE
from env_client.cli.command_line import CommandLine
from env_client.cli.failures import Failure, Interrupted, correction
from env_client.cli.printer import Printer
from env_client.client import SandboxClient
from env_client.errors import CallNotFound, SandboxError, TransportError
from env_client.messages.calls import new_call_id
from env_client.values import CallOptions, Reason, Result

#: As timeout(1).
TIMED_OUT = 124
#: As env(1) and a shell: the command is there, or could be, and cannot be started; here because its folder cannot be entered.
CANNOT_START = 126
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
    Reason.TOOL_ERROR: "correct `--cwd`: a relative one begins in the workspace",
}


def execute(client: SandboxClient, lease_id: str, command: CommandLine, options: CallOptions, printer: Printer, *, forward_input: bool, cancel: bool) -> Result:
    """Run a command in a slot; its output goes to standard output as it comes, but for `--json`, whose document has it.

    Args:
        client: of the service.
        lease_id: in whose slot.
        command: what to run.
        options: its deadlines.
        printer: whether the result is asked for as JSON.
        forward_input: give it this process's standard input, where that is no terminal.
        cancel: whether to cancel the call when this process is interrupted.

    Raises:
        Interrupted: with the result of the cancelled call, where there is one.
    """
    stdin, input_path = _forward(client, lease_id, printer) if forward_input else (None, None)
    call_id = new_call_id()
    options["call_id"] = call_id
    args = command.args(stdin, input_path)
    try:
        if printer.as_json:
            return client.exec(lease_id, "bash", args, **options)
        return _stream(client, lease_id, args, options, printer)
    except (Interrupted, BrokenPipeError) as ended:
        result = _cancelled(client, lease_id, call_id, printer) if cancel else None
        if isinstance(ended, Interrupted):
            ended.document = result
        raise


def unanswered(error: TransportError, lease_id: str, call_id: str | None) -> Failure | TransportError:
    """A call whose end did not come, and how to ask for it; the error itself where there was no call yet."""
    if call_id is None or error.extra.get("may_have_run") is False:
        return error
    next_step = f"the command may have run, or still run: GET /v1/leases/{lease_id}/calls/{call_id} says so once the service answers, with its result"
    return Failure(error.detail, next_step, error.code, {"lease_id": lease_id, "call_id": call_id})


def _cancelled(client: SandboxClient, lease_id: str, call_id: str, printer: Printer) -> Result | None:
    try:
        return client.cancel(lease_id, call_id)
    except CallNotFound:  # it had not begun
        return None
    except SandboxError as error:
        printer.note(f"the command could not be cancelled and ends at its timeout: {error.detail}")
        return None


def _stream(client: SandboxClient, lease_id: str, args: Mapping[str, Any], options: CallOptions, printer: Printer) -> Result:
    # All of the output comes with the events, byte for byte; the result need not carry it once more.
    options |= {"encoding": "base64", "output_limit_bytes": 0}
    written = 0
    for item in client.exec_events(lease_id, "bash", args, **options):
        if isinstance(item, Result):
            _tell_missing(item.output_bytes - written, printer)
            return item
        sys.stdout.buffer.write(item.data)
        sys.stdout.buffer.flush()
        written += len(item.data)
    raise AssertionError("a stream of a call ends with its result, or raises")


def _tell_missing(count: int, printer: Printer) -> None:
    """The command's verdict stands, but nobody is to take what came for all that it wrote."""
    if count > 0:
        sentence = f"{count:,} bytes of the output are missing: a slot keeps only so much of what a command writes"
        printer.failure(Failure(sentence, "have it write to a file in /workspace, and copy that with `sandbox cp`"))


def conclude(result: Result, command: CommandLine, printer: Printer) -> int:
    """Say how a call ended where it was not by itself; returns the exit code that stands for it."""
    if printer.as_json:
        printer.document(result)
    if result.reason == Reason.EXIT:
        printer.note(command.hint(result.exit_code, result.output_bytes, on_terminal=os.isatty(0)))
        return OWN_FAILURE if result.exit_code is None else result.exit_code
    next_step = _NEXT_STEPS.get(result.reason, "")
    if result.reason == Reason.INVALID_ARGS:
        next_step = correction(result.error.partition(":")[0]) or "correct that, and try again"
    printer.failure(Failure(f"{result.error or 'the command did not end by itself'} [{result.reason}]", next_step))
    return _exit_code(result)


def _exit_code(result: Result) -> int:
    """The exit code for a command that did not end by itself."""
    if result.reason in _TIMEOUTS:
        return TIMED_OUT
    if result.reason == Reason.CANCELLED:
        return 128 + signal.SIGINT
    if result.reason == Reason.TOOL_ERROR:
        return CANNOT_START
    if result.reason in (Reason.OOM, Reason.RESOURCE_LIMIT):
        return OUT_OF_MEMORY if result.exit_code is None else result.exit_code
    return OWN_FAILURE


def _forward(client: SandboxClient, lease_id: str, printer: Printer) -> tuple[str | None, str | None]:
    """Standard input as an argument, or as a file of the slot; neither where it is a terminal or closed."""
    try:
        if stat.S_ISCHR(os.fstat(0).st_mode):  # a terminal, or /dev/null
            return None, None
    except OSError:
        return None, None
    chunks = _input(printer)
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


def _input(printer: Printer) -> Iterator[bytes]:
    if not select.select([0], [], [], WAIT_NOTE_S)[0]:
        printer.note("waiting for standard input to end; --no-stdin runs the command without it")
    while chunk := os.read(0, 1 << 16):
        yield chunk

"""Running one command in a slot: its input, its output as it is written, and the exit code for its result."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from env_client.cli.command_line import CommandLine
from env_client.cli.exit_codes import CANNOT_START, OUT_OF_MEMORY, OWN_FAILURE, TIMED_OUT
from env_client.cli.failures import Failure, Interrupted, next_step_for_field
from env_client.cli.printer import Printer
from env_client.client import SandboxClient
from env_client.errors import CallNotFound, SandboxError, TransportError
from env_client.messages.calls import new_call_id
from env_client.values import CallOptions, Reason, Result

#: Standard input up to this size is sent with the call. More input, or input that is not UTF-8, is written to a file of the slot first.
MAX_INLINE_INPUT_BYTES = 1 << 20
#: How long standard input may deliver nothing until a note says that the command waits for it, in seconds.
INPUT_NOTE_DELAY_S = 3.0

_TIMEOUTS = frozenset({Reason.TIMEOUT, Reason.NO_OUTPUT_TIMEOUT})
_NEXT_STEPS: Mapping[str, str] = {
    Reason.TIMEOUT: "`--timeout SECONDS` allows more time, up to the pool's max_timeout_s",
    Reason.NO_OUTPUT_TIMEOUT: "`--no-output-timeout SECONDS` allows more time",
    Reason.OOM: "give the pool more slot_memory_mb",
    Reason.RESOURCE_LIMIT: "the pool's spec sets the limits: `sandbox pools NAME`",
    Reason.LEASE_LOST: "`sandbox acquire` acquires a new lease",
    Reason.SANDBOX_LOST: "`sandbox acquire` acquires a new lease; `sandbox sandboxes` shows the state of the sandbox",
    Reason.BACKEND_ERROR: "`sandbox doctor` checks the service",
    Reason.NOT_IMPLEMENTED: "`sandbox doctor` lists what the service offers",
    Reason.TOOL_ERROR: "correct `--cwd`: a relative path begins in the workspace",
}


def execute_command(
    client: SandboxClient, lease_id: str, command: CommandLine, options: CallOptions, printer: Printer, *, forward_input: bool, cancel: bool
) -> Result:
    """Run a command in a slot. Its output is written to standard output as it arrives; with `--json`, it is in the document instead.

    Args:
        client: a client of the service.
        lease_id: the lease of the slot.
        command: the command.
        options: the timeouts of the call.
        printer: prints notes, and says whether the result is printed as JSON.
        forward_input: pass this process's standard input on, unless it is a terminal.
        cancel: cancel the call if this process is interrupted.

    Raises:
        Interrupted: a signal came. If the call was cancelled, `document` has its result.
    """
    stdin, input_path = _forward_stdin(client, lease_id, printer) if forward_input else (None, None)
    call_id = new_call_id()
    options["call_id"] = call_id
    args = command.tool_args(stdin, input_path)
    try:
        if printer.as_json:
            return client.exec(lease_id, "bash", args, **options)
        return _stream_output(client, lease_id, args, options, printer)
    except (Interrupted, BrokenPipeError) as ended:
        result = _cancel_call(client, lease_id, call_id, printer) if cancel else None
        if isinstance(ended, Interrupted):
            ended.document = result
        raise


def failure_for_lost_result(error: TransportError, lease_id: str, call_id: str | None) -> Failure | TransportError:
    """Describe the loss of a call whose result did not arrive, with the route that has the result; return the error itself if no call was sent."""
    if call_id is None or error.extra.get("may_have_run") is False:
        return error
    route = f"GET /v1/leases/{lease_id}/calls/{call_id}"
    next_step = f"the command may have run, or still run: {route} returns its state or result once the service responds"
    return Failure(error.detail, next_step, error.code, {"lease_id": lease_id, "call_id": call_id})


def _cancel_call(client: SandboxClient, lease_id: str, call_id: str, printer: Printer) -> Result | None:
    try:
        return client.cancel(lease_id, call_id)
    except CallNotFound:  # the call had not started
        return None
    except SandboxError as error:
        printer.print_note(f"the command could not be cancelled and ends at its timeout: {error.detail}")
        return None


def _stream_output(client: SandboxClient, lease_id: str, args: Mapping[str, Any], options: CallOptions, printer: Printer) -> Result:
    # The events carry the exact bytes of the whole output, so the result need not contain any.
    options |= {"encoding": "base64", "output_limit_bytes": 0}
    written = 0
    for item in client.exec_events(lease_id, "bash", args, **options):
        if isinstance(item, Result):
            _report_missing_output(item.output_bytes - written, printer)
            return item
        sys.stdout.buffer.write(item.data)
        sys.stdout.buffer.flush()
        written += len(item.data)
    raise AssertionError("the stream of a call ended without its result and without an error")


def _report_missing_output(count: int, printer: Printer) -> None:
    """Print a failure if output is missing, so that the user does not take the output for complete. The exit code stays that of the command."""
    if count > 0:
        sentence = f"{count:,} bytes of the output are missing: a slot keeps only so much of what a command writes"
        printer.print_failure(Failure(sentence, "make the command write to a file in /workspace, and copy the file with `sandbox cp`"))


def report_result(result: Result, command: CommandLine, printer: Printer) -> int:
    """Print how a call ended, if it did not end by itself; return the exit code for it."""
    if printer.as_json:
        printer.print_json(result)
    if result.reason == Reason.EXIT:
        printer.print_note(command.hint(result.exit_code, result.output_bytes, on_terminal=os.isatty(0)))
        return OWN_FAILURE if result.exit_code is None else result.exit_code
    next_step = _NEXT_STEPS.get(result.reason, "")
    if result.reason == Reason.INVALID_ARGS:
        next_step = next_step_for_field(result.error.partition(":")[0]) or "correct the argument, and try again"
    printer.print_failure(Failure(f"{result.error or 'the command did not end by itself'} [{result.reason}]", next_step))
    return _exit_code(result)


def _exit_code(result: Result) -> int:
    """Return the exit code for a command that did not end by itself."""
    if result.reason in _TIMEOUTS:
        return TIMED_OUT
    if result.reason == Reason.CANCELLED:
        return 128 + signal.SIGINT
    if result.reason == Reason.TOOL_ERROR:
        return CANNOT_START
    if result.reason in (Reason.OOM, Reason.RESOURCE_LIMIT):
        return OUT_OF_MEMORY if result.exit_code is None else result.exit_code
    return OWN_FAILURE


def _forward_stdin(client: SandboxClient, lease_id: str, printer: Printer) -> tuple[str | None, str | None]:
    """Return standard input as a text argument or as the path of a file in the slot; neither if it is a terminal or closed."""
    try:
        if stat.S_ISCHR(os.fstat(0).st_mode):  # a terminal, or /dev/null
            return None, None
    except OSError:
        return None, None
    chunks = _read_stdin(printer)
    head = b""
    for chunk in chunks:
        head += chunk
        if len(head) > MAX_INLINE_INPUT_BYTES:
            break
    else:
        try:
            return head.decode(), None
        except UnicodeDecodeError:
            pass  # small, but not text, so it goes into a file as well
    input_path = f"/tmp/.input-{new_call_id()}"
    client.put_file(lease_id, input_path, chain([head], chunks), mode=0o600)
    return None, input_path


def _read_stdin(printer: Printer) -> Iterator[bytes]:
    if not select.select([0], [], [], INPUT_NOTE_DELAY_S)[0]:
        printer.print_note("waiting for standard input to end; --no-stdin runs the command without it")
    while chunk := os.read(0, 1 << 16):
        yield chunk

"""The messages for failures: one sentence on what is wrong, and one on what to do next."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from env_client import errors

_OTHER_LEASE = "`sandbox leases` lists those you hold, `sandbox acquire` acquires a new one"
_START = "start one with `python -m sandbox_server serve`, or set SANDBOX_URL to one that runs"

#: The next step for each class of error. A class that is not listed has the next step of its base class.
NEXT_STEPS: Mapping[type[errors.SandboxError], str] = {
    errors.ServiceError: "the request id finds the cause in the service's log",
    errors.Unauthorized: "set SANDBOX_TOKEN to a token of this service; one that made its own keeps it in the file `token` of its state folder",
    errors.Forbidden: "ask with the token of an admin in SANDBOX_TOKEN, or ask an admin",
    errors.RouteNotFound: "check that SANDBOX_URL is the address of a sandbox service of this version",
    errors.MethodNotAllowed: "check that the service is of the same version as `sandbox --version`",
    errors.PoolNotFound: "`sandbox pools` lists them, `sandbox pool apply` creates one",
    errors.SandboxNotFound: "`sandbox sandboxes` lists them",
    errors.LeaseNotFound: _OTHER_LEASE,
    errors.LeaseLost: _OTHER_LEASE,
    errors.FileNotFound: "`sandbox ls LEASE:FOLDER` lists a folder",
    errors.FileError: "`sandbox ls LEASE:FOLDER` shows what is there",
    errors.CallNotFound: "calls are known until their lease ends",
    errors.PoolConflict: "`sandbox pools NAME` shows the owner, the origin and the state of a pool",
    errors.CallConflict: "leave out the id or key, so that a new one is created",
    errors.PayloadTooLarge: "copy large data with `sandbox cp`, and read it from the file",
    errors.InvalidRequest: "correct the request, and try again",
    errors.QuotaExceeded: "release what is not needed: `sandbox leases`, then `sandbox release`",
    errors.NotImplementedYet: "this service or backend does not offer it; `sandbox doctor` lists what it offers",
    errors.PortClosed: "start the program, and have it listen on that port of 127.0.0.1",
    errors.NoCapacity: "`sandbox leases` lists what you hold, `sandbox pools` how many slots there are; `--wait` of acquire and run waits longer",
    errors.Draining: "use another pool (`sandbox pools`), or try again when the service runs again",
    errors.BackendUnavailable: "`sandbox doctor` says what is missing and how to get it",
    errors.StorageUnavailable: "check the disk with the service's state folder",
    errors.TransportError: "try again; `sandbox doctor` checks the service",
    errors.ConnectFailed: _START,
    errors.BadAnswer: "check that SANDBOX_URL is the address of a sandbox service",
    errors.ServiceNotFound: "`sandbox run` needs no service: it starts one for itself",
    errors.ClientClosed: "try again; the command line creates a client for each command",
    errors.EmbeddedFailed: "`sandbox doctor` says what this machine can do",
}

#: The option that sets a field of a request.
OPTION_FOR_FIELD: Mapping[str, str] = {
    "ttl_s": "--ttl", "wait_s": "--wait", "count": "--count", "run_id": "--run-id", "trajectory_id": "--trajectory-id", "trajectory_ids": "--trajectory-id",
    "priority": "--priority", "labels": "--label", "pool": "--pool", "allow_network": "--no-network", "allow_hosts": "--allow-host", "cache": "--cache",
    "timeout_s": "--timeout", "no_output_timeout_s": "--no-output-timeout", "cwd": "--cwd", "env": "--env",
}  # fmt: skip
#: The next step for a wrong field for which "correct the option" does not say enough.
NEXT_STEP_FOR_FIELD: Mapping[str, str] = {
    "path": "`ls` and `cp` reach /workspace, where relative paths begin, and /tmp; a command sees the rest: sandbox exec LEASE -- ls -la /etc",
    "count": "ask for fewer with `--count`; a pool holds max_sandboxes times slots_per_sandbox: `sandbox pools NAME` shows them",
    "name": "give it such a name, for example gpu-2",
    "backend": "`sandbox doctor` lists the backends",
    "tenant": "`sandbox pools --tenant '*'` lists the pools of all tenants, for admins",
}
#: The next step when a limit of the tenant's pools is reached.
NEXT_STEP_FOR_LIMIT: Mapping[str, str] = {
    "max_slots": "`sandbox pools` lists your pools; make one smaller (`sandbox pool apply NAME --set max_sandboxes=N`), or `sandbox pool delete` one",
}


class Failure(Exception):
    """The command line cannot do what was requested.

    Args:
        sentence: what is wrong.
        next_step: what to do about it.
        code: the error code in the `--json` document.
        document: what was done in spite of the failure; `--json` prints it in the same document.
    """

    def __init__(self, sentence: str, next_step: str, code: str = "usage", document: Mapping[str, Any] | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.next_step = next_step
        self.code = code
        self.document = document


class Interrupted(KeyboardInterrupt):
    """A signal that ends the command, as Ctrl-C does.

    Args:
        signal_number: the signal.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number
        #: The result that was known when the signal came; `--json` prints it.
        self.document: Any = None


def failure_from_error(error: errors.SandboxError) -> Failure:
    """Describe an error of the client for a person."""
    next_step = (
        _next_step_for_invalid_field(error)
        or _next_step_for_reached_limit(error)
        or _next_step_for_wrong_address(error)
        or next((NEXT_STEPS[kind] for kind in type(error).__mro__ if kind in NEXT_STEPS), "")
    )
    sentence = error.detail
    if isinstance(error, errors.InternalError) and error.request_id:
        sentence = f"{sentence.rstrip('.')} (request {error.request_id})"
    return Failure(sentence, next_step, error.code)


def _next_step_for_invalid_field(error: errors.SandboxError) -> str:
    field = error.extra.get("field")
    if not isinstance(error, errors.InvalidRequest) or not isinstance(field, str) or "limit" in error.extra:
        return ""
    return next_step_for_field(field)


def _next_step_for_reached_limit(error: errors.SandboxError) -> str:
    return NEXT_STEP_FOR_LIMIT.get(str(error.extra.get("limit")), "") if isinstance(error, errors.QuotaExceeded) else ""


def _next_step_for_wrong_address(error: errors.SandboxError) -> str:
    address = os.environ.get("SANDBOX_URL", "").strip().rstrip("/")
    if not isinstance(error, errors.RouteNotFound) or not address.endswith("/v1"):
        return ""
    return f"leave /v1 out of SANDBOX_URL, as in {address.removesuffix('/v1')}"


def next_step_for_field(field: str) -> str:
    """Return what to do about a field that the service refused; an empty string if there is no specific advice."""
    name = field.partition(".")[0]
    return NEXT_STEP_FOR_FIELD.get(name) or (f"correct `{OPTION_FOR_FIELD[name]}`" if name in OPTION_FOR_FIELD else "")


def failure_from_errors(errors_by_id: Mapping[str, errors.SandboxError], document: Mapping[str, Any]) -> Failure:
    """Combine the errors of several leases: all sentences, and the next step of the first.

    Args:
        errors_by_id: the errors, by lease id; at least one.
        document: the results of all leases, for `--json`.
    """
    first = failure_from_error(next(iter(errors_by_id.values())))
    return Failure("\n".join(error.detail for error in errors_by_id.values()), first.next_step, first.code, document)


def failure_document(failure: Failure, error: errors.SandboxError | None = None) -> dict[str, Any]:
    """Return the `--json` document of a failure."""
    members: dict[str, Any] = {"code": failure.code, "detail": failure.sentence, "next_step": failure.next_step}
    if error is not None:
        members |= {"status": error.status, "request_id": error.request_id, **error.extra}
    return {**(failure.document or {}), "error": members}


def interruption_document(interrupted: Interrupted) -> dict[str, Any]:
    """Return the `--json` document of a command that a signal ended before it had a result."""
    return failure_document(Failure(f"ended by {signal.Signals(interrupted.signal_number).name}", "", "interrupted"))

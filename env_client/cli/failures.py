"""What a person reads when something does not work: one sentence, and what to do next."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from env_client import errors

_OTHER_LEASE = "`sandbox leases` lists those you hold, `sandbox acquire` takes a new one"
_START = "start one with `python -m sandbox_server serve`, or set SANDBOX_URL to one that runs"

#: The next step for each kind of error; a kind that is not listed has that of its base class.
NEXT_STEPS: Mapping[type[errors.SandboxError], str] = {
    errors.ServiceError: "the request id finds it in the service's log",
    errors.Unauthorized: "set SANDBOX_TOKEN to a token of this service; one that made its own keeps it in the file `token` of its state folder",
    errors.Forbidden: "ask with the token of an admin in SANDBOX_TOKEN, or ask an admin",
    errors.RouteNotFound: "is SANDBOX_URL the address of a sandbox service, and is it of this version?",
    errors.MethodNotAllowed: "is the service of this version? `sandbox --version` and the service's should be the same",
    errors.PoolNotFound: "`sandbox pools` lists them, `sandbox pool apply` makes one",
    errors.SandboxNotFound: "`sandbox sandboxes` lists them",
    errors.LeaseNotFound: _OTHER_LEASE,
    errors.LeaseLost: _OTHER_LEASE,
    errors.FileNotFound: "`sandbox ls LEASE:FOLDER` lists a folder",
    errors.FileError: "`sandbox ls LEASE:FOLDER` shows what is there",
    errors.CallNotFound: "calls are known until their lease ends",
    errors.PoolConflict: "`sandbox pools NAME` says whose a pool is, where it comes from and how it stands",
    errors.CallConflict: "leave out the id or key to have a new one made",
    errors.PayloadTooLarge: "copy large data with `sandbox cp`, and read it from there",
    errors.InvalidRequest: "correct that, and try again",
    errors.QuotaExceeded: "release what is not needed: `sandbox leases`, then `sandbox release`",
    errors.NotImplementedYet: "this service or backend does not have it; `sandbox doctor` says what there is",
    errors.NoCapacity: "`sandbox leases` lists what you hold, `sandbox pools` how many slots there are; `--wait` of acquire and run waits longer",
    errors.Draining: "use another pool (`sandbox pools`), or ask again once the service is back",
    errors.BackendUnavailable: "`sandbox doctor` says what is missing and how to get it",
    errors.StorageUnavailable: "look at the disk that holds the service's state folder",
    errors.TransportError: "try again; `sandbox doctor` looks at the service",
    errors.ConnectFailed: _START,
    errors.BadAnswer: "is SANDBOX_URL the address of a sandbox service?",
    errors.ServiceNotFound: "`sandbox run` needs none: it starts one for itself",
    errors.ClientClosed: "try again; the command line makes a client for each command",
    errors.EmbeddedFailed: "`sandbox doctor` says what this machine can do",
}

#: The option that gives a field of a request.
OPTION_OF: Mapping[str, str] = {
    "ttl_s": "--ttl", "wait_s": "--wait", "count": "--count", "run_id": "--run-id", "trajectory_id": "--trajectory-id", "trajectory_ids": "--trajectory-id",
    "priority": "--priority", "labels": "--label", "pool": "--pool", "allow_network": "--no-network", "cache": "--cache",
    "timeout_s": "--timeout", "no_output_timeout_s": "--no-output-timeout", "cwd": "--cwd", "env": "--env",
}  # fmt: skip
#: The next step for a field that is wrong, where correcting its option does not say enough.
STEP_OF_FIELD: Mapping[str, str] = {
    "path": "`ls` and `cp` reach /workspace, where relative paths begin, and /tmp; a command sees the rest: sandbox exec LEASE -- ls -la /etc",
    "count": "ask for fewer with `--count`; a pool holds max_sandboxes times slots_per_sandbox: `sandbox pools NAME` shows them",
    "name": "give it such a name, for example gpu-2",
    "backend": "`sandbox doctor` says which backends there are",
    "tenant": "`sandbox pools --tenant '*'` lists the pools of all tenants, for admins",
}
#: The next step for a limit of a tenant's pools that is reached.
STEP_OF_LIMIT: Mapping[str, str] = {
    "max_slots": "`sandbox pools` lists your pools; make one smaller (`sandbox pool apply NAME --set max_sandboxes=N`), or `sandbox pool delete` one",
}


class Failure(Exception):
    """The command line cannot do what was asked.

    Args:
        sentence: what is wrong.
        next_step: what to do about it.
        code: what it is called in `--json`.
        document: what could be done all the same; `--json` prints it in the same document.
    """

    def __init__(self, sentence: str, next_step: str, code: str = "usage", document: Mapping[str, Any] | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.next_step = next_step
        self.code = code
        self.document = document


class Interrupted(KeyboardInterrupt):
    """A signal asks to end, as Ctrl-C does.

    Args:
        signal_number: which.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number
        #: What is known by then; `--json` prints it.
        self.document: Any = None


def failure_of(error: errors.SandboxError) -> Failure:
    """An error of the client as a failure to be read by a person."""
    next_step = (
        _step_for_field(error)
        or _step_for_limit(error)
        or _step_for_address(error)
        or next((NEXT_STEPS[kind] for kind in type(error).__mro__ if kind in NEXT_STEPS), "")
    )
    sentence = error.detail
    if isinstance(error, errors.InternalError) and error.request_id:
        sentence = f"{sentence.rstrip('.')} (request {error.request_id})"
    return Failure(sentence, next_step, error.code)


def _step_for_field(error: errors.SandboxError) -> str:
    field = error.extra.get("field")
    if not isinstance(error, errors.InvalidRequest) or not isinstance(field, str) or "limit" in error.extra:
        return ""
    return correction(field)


def _step_for_limit(error: errors.SandboxError) -> str:
    return STEP_OF_LIMIT.get(str(error.extra.get("limit")), "") if isinstance(error, errors.QuotaExceeded) else ""


def _step_for_address(error: errors.SandboxError) -> str:
    address = os.environ.get("SANDBOX_URL", "").strip().rstrip("/")
    if not isinstance(error, errors.RouteNotFound) or not address.endswith("/v1"):
        return ""
    return f"leave /v1 out of SANDBOX_URL, as in {address.removesuffix('/v1')}"


def correction(field: str) -> str:
    """What to do about a field that the service does not take; nothing where all that can be said is to correct it."""
    name = field.partition(".")[0]
    return STEP_OF_FIELD.get(name) or (f"correct `{OPTION_OF[name]}`" if name in OPTION_OF else "")


def failure_of_several(lost: Mapping[str, errors.SandboxError], document: Mapping[str, Any]) -> Failure:
    """What went wrong with some of many: a sentence each, and what to do about the first.

    Args:
        lost: the errors, by what they are of; at least one.
        document: what came of all of them.
    """
    first = failure_of(next(iter(lost.values())))
    return Failure("\n".join(error.detail for error in lost.values()), first.next_step, first.code, document)


def document_of(failure: Failure, error: errors.SandboxError | None = None) -> dict[str, Any]:
    """A failure as `--json` prints it."""
    told: dict[str, Any] = {"code": failure.code, "detail": failure.sentence, "next_step": failure.next_step}
    if error is not None:
        told |= {"status": error.status, "request_id": error.request_id, **error.extra}
    return {**(failure.document or {}), "error": told}


def interruption(interrupted: Interrupted) -> dict[str, Any]:
    """A signal that ended a command before there was anything to tell, as `--json` prints it."""
    return document_of(Failure(f"ended by {signal.Signals(interrupted.signal_number).name}", "", "interrupted"))

"""What a person reads when something does not work: one sentence, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from env_client import errors

_OTHER_LEASE = "`sandbox leases` lists those you hold, `sandbox acquire` takes a new one"
_START = "start one with `python -m sandbox_server serve`, or set SANDBOX_URL to one that runs"

#: The next step for each kind of error; a kind that is not listed has that of its base class.
NEXT_STEPS: Mapping[type[errors.SandboxError], str] = {
    errors.ServiceError: "the request id finds it in the service's log",
    errors.Unauthorized: "set SANDBOX_TOKEN to a token of this service; one that made its own keeps it in the file `token` of its state folder",
    errors.Forbidden: "ask with the token of an admin in SANDBOX_TOKEN",
    errors.RouteNotFound: "is SANDBOX_URL the address of a sandbox service, and is it of this version?",
    errors.MethodNotAllowed: "is the service of this version? `sandbox --version` and the service's should be the same",
    errors.PoolNotFound: "`sandbox pools` lists them, `sandbox pool apply` makes one",
    errors.SandboxNotFound: "`sandbox sandboxes` lists them",
    errors.LeaseNotFound: _OTHER_LEASE,
    errors.LeaseLost: _OTHER_LEASE,
    errors.FileNotFound: "`sandbox ls LEASE:FOLDER` lists a folder",
    errors.FileError: "`sandbox ls LEASE:FOLDER` shows what is there",
    errors.CallNotFound: "calls are known until their lease ends",
    errors.PoolConflict: "a pool of the settings file is changed there; another backend needs a pool of another name",
    errors.CallConflict: "leave out the id or key to have a new one made",
    errors.PayloadTooLarge: "copy large data with `sandbox cp`, and read it from there",
    errors.InvalidRequest: "see `--help` for what is taken",
    errors.QuotaExceeded: "release what is not needed: `sandbox leases`, then `sandbox release`",
    errors.NotImplementedYet: "this service or backend does not have it; `sandbox doctor` says what there is",
    errors.NoCapacity: "wait longer with `--wait`, release leases (`sandbox leases`), or raise the pool's max_sandboxes",
    errors.Draining: "use another pool (`sandbox pools`), or ask again once the service is back",
    errors.BackendUnavailable: "`sandbox doctor` says what is missing and how to get it",
    errors.StorageUnavailable: "look at the disk that holds the service's state folder",
    errors.TransportError: "try again; `sandbox doctor` looks at the service",
    errors.ConnectFailed: _START,
    errors.BadAnswer: "is SANDBOX_URL the address of a sandbox service?",
    errors.ServiceNotFound: "`sandbox run` needs none: it starts one for itself",
    errors.EmbeddedFailed: "`sandbox doctor` says what this machine can do",
}


class Failure(Exception):
    """The command line cannot do what was asked.

    Args:
        sentence: what is wrong.
        next_step: what to do about it.
        code: what it is called in `--json`.
    """

    def __init__(self, sentence: str, next_step: str, code: str = "usage") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.next_step = next_step
        self.code = code


class Interrupted(KeyboardInterrupt):
    """A signal asks to end, as Ctrl-C does.

    Args:
        signal_number: which.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.signal_number = signal_number


def failure_of(error: errors.SandboxError) -> Failure:
    """An error of the client as a failure to be read by a person."""
    next_step = next((NEXT_STEPS[kind] for kind in type(error).__mro__ if kind in NEXT_STEPS), "")
    sentence = error.detail
    if isinstance(error, errors.InternalError) and error.request_id:
        sentence = f"{sentence.rstrip('.')} (request {error.request_id})"
    return Failure(sentence, next_step, error.code)


def document_of(failure: Failure, error: errors.SandboxError | None) -> dict[str, Any]:
    """A failure as `--json` prints it."""
    told: dict[str, Any] = {"code": failure.code, "detail": failure.sentence, "next_step": failure.next_step}
    if error is not None:
        told |= {"status": error.status, "request_id": error.request_id, **error.extra}
    return {"error": told}

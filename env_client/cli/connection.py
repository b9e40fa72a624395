"""Reaching the service, or one of `sandbox run`'s own where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from env_client.cli.failures import Failure
from env_client.cli.printer import Printer
from env_client.client import SandboxClient
from env_client.discovery import Endpoint, find_service, local_service, state_dirs
from env_client.embedded_service import embedded
from env_client.errors import ConnectFailed, ServiceNotFound
from env_client.retry import RetryPolicy

#: Somebody waits: shorter than the library's, long enough for a service that is started again.
PATIENCE = RetryPolicy(total_s=15.0)
AT_ONCE = RetryPolicy(total_s=0.0)
#: The pool of a service that `sandbox run` starts for itself: one slot, and nobody else waits for it.
OWN_POOL: Mapping[str, Any] = {
    "slots_per_sandbox": 1,
    "min_sandboxes": 1,
    "max_sandboxes": 1,
    "max_lifetime_s": 86_400 * 30,
    "default_timeout_s": 3600,
    "max_timeout_s": 86_400,
}


@contextmanager
def connected() -> Iterator[SandboxClient]:
    """A client of the service that the environment or this machine names.

    Raises:
        Failure: nobody names one, or nothing answers there.
    """
    endpoint = _named()
    try:
        check(endpoint)
    except ConnectFailed as error:
        raise _nobody(endpoint) from error
    with SandboxClient(endpoint.url, endpoint.token, retry=PATIENCE) as client:
        yield client


@contextmanager
def connected_or_own(pool: str | None, printer: Printer) -> Iterator[SandboxClient]:
    """As `connected`; where no service runs on this machine and the environment names none, one that lives as long as the block."""
    if os.environ.get("SANDBOX_URL") or _answering_here():
        with connected() as client:
            yield client
        return
    if pool not in (None, "default"):
        next_step = "leave out --pool to run in a slot of this machine, or set SANDBOX_URL"
        raise Failure(f"no service runs, so there is no pool {pool!r}", next_step, "pool_not_found")
    for path in (state_dir / "server.json" for state_dir in state_dirs(os.environ, os.getuid())):
        if os.path.exists(path):  # a service that ended by itself would have taken it along
            printer.note(f"the service that {path} names is gone; this command runs on one of its own")
    with embedded({"default": OWN_POOL}) as service, service.client(retry=PATIENCE) as client:
        yield client


def check(endpoint: Endpoint) -> None:
    """See whether anything listens there, without patience.

    Raises:
        ConnectFailed: nothing does.
    """
    with SandboxClient(endpoint.url, endpoint.token, retry=AT_ONCE) as client:
        client.healthz()


def _named() -> Endpoint:
    try:
        return find_service()
    except ServiceNotFound as error:
        if os.environ.get("SANDBOX_URL"):
            next_step = "set SANDBOX_URL to an address such as http://127.0.0.1:8700, or unset it for the service of this machine"
        else:
            next_step = "`sandbox run -- CMD...` needs none: it starts one for itself"
        raise Failure(error.detail, next_step, error.code) from error


def _answering_here() -> bool:
    endpoint = local_service(os.environ)
    if endpoint is None:
        return False
    try:
        check(endpoint)
    except ConnectFailed:  # a service that was killed leaves its server.json
        return False
    return True


def _nobody(endpoint: Endpoint) -> Failure:
    if endpoint.source == "SANDBOX_URL":
        next_step = "start the service there, or correct SANDBOX_URL; without it, the service of this machine is used"
    else:
        next_step = "the service is gone: start it again with `python -m sandbox_server serve`, or set SANDBOX_URL to one that runs"
    return Failure(f"no service answers at {endpoint.url} (from {endpoint.source})", next_step, ConnectFailed.code)

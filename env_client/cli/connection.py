"""Connecting to the service, and starting one for `sandbox run` if none runs."""

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

#: A person waits for the command, so it gives up earlier than the library does, but only after a service had time to restart.
RETRY_POLICY = RetryPolicy(total_s=15.0)
NO_RETRIES = RetryPolicy(total_s=0.0)
#: The pool of a service that `sandbox run` starts for itself. It has one slot; as nothing else waits for that slot, the time limits are long.
OWN_POOL: Mapping[str, Any] = {
    "slots_per_sandbox": 1,
    "min_sandboxes": 1,
    "max_sandboxes": 1,
    "max_lifetime_s": 86_400 * 30,
    "default_timeout_s": 3600,
    "max_timeout_s": 86_400,
}


@contextmanager
def connect_to_service() -> Iterator[SandboxClient]:
    """Connect to the service that the environment or this machine names.

    Raises:
        Failure: no service is named, or the named one does not respond.
    """
    endpoint = find_endpoint()
    try:
        check_service_responds(endpoint)
    except ConnectFailed as error:
        raise _no_response_failure(endpoint) from error
    with SandboxClient(endpoint.url, endpoint.token, retry=RETRY_POLICY) as client:
        yield client


@contextmanager
def connect_or_start_service(pool: str | None, printer: Printer) -> Iterator[SandboxClient]:
    """Connect as `connect_to_service` does. If no service runs on this machine and the environment names none, start one for the duration of the block.

    Args:
        pool: the pool that the command asks for; a service that is started here has only the pool `default`.
        printer: prints a note if a service was killed.

    Raises:
        Failure: the named service does not respond, or there is no such pool.
    """
    if os.environ.get("SANDBOX_URL") or _local_service_responds():
        with connect_to_service() as client:
            yield client
        return
    if pool not in (None, "default"):
        next_step = "leave out --pool to run in a slot of this machine, or set SANDBOX_URL"
        raise Failure(f"no service runs, so there is no pool {pool!r}", next_step, "pool_not_found")
    for path in (state_dir / "server.json" for state_dir in state_dirs(os.environ, os.getuid())):
        if os.path.exists(path):  # a service that ends normally deletes the file
            printer.print_note(f"the service that {path} names does not run any more; this command starts one of its own")
    with embedded({"default": OWN_POOL}) as service, service.client(retry=RETRY_POLICY) as client:
        yield client


def check_service_responds(endpoint: Endpoint) -> None:
    """Check that something listens at an address, without retries.

    Raises:
        ConnectFailed: nothing listens there.
    """
    with SandboxClient(endpoint.url, endpoint.token, retry=NO_RETRIES) as client:
        client.healthz()


def find_endpoint() -> Endpoint:
    """Find the service that the environment or this machine names.

    Raises:
        Failure: none is named.
    """
    try:
        return find_service()
    except ServiceNotFound as error:
        if os.environ.get("SANDBOX_URL"):
            next_step = "set SANDBOX_URL to an address such as http://127.0.0.1:8700, or unset it for the service of this machine"
        else:
            next_step = "`sandbox run -- CMD...` needs no service: it starts one for itself"
        raise Failure(error.detail, next_step, error.code) from error


def _local_service_responds() -> bool:
    endpoint = local_service(os.environ)
    if endpoint is None:
        return False
    try:
        check_service_responds(endpoint)
    except ConnectFailed:  # a service that was killed leaves its server.json behind
        return False
    return True


def _no_response_failure(endpoint: Endpoint) -> Failure:
    if endpoint.source == "SANDBOX_URL":
        next_step = "start the service there, or correct SANDBOX_URL; without it, the service of this machine is used"
    else:
        next_step = "the service is gone: start it again with `python -m sandbox_server serve`, or set SANDBOX_URL to one that runs"
    return Failure(f"no service responds at {endpoint.url} (from {endpoint.source})", next_step, ConnectFailed.code)

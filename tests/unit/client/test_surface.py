"""The public names of the client library, and its dependencies."""

from __future__ import annotations

import ast
import inspect
import pickle
import sys
from pathlib import Path

import pytest

import env_client
from env_client import errors
from env_client.client import AsyncSandboxClient, SandboxClient
from env_client.leases import AsyncLease, Lease
from sandbox_server.core.errors import PoolServiceError

PACKAGE = Path(env_client.__file__).parent

EXPORTED = [
    "AcquireOptions", "Acquired", "Artifact", "AsyncLease", "AsyncSandboxClient", "BackendUnavailable", "BadAnswer", "Call", "CallConflict", "CallGatherer",
    "CallNotFound", "CallOptions", "CallStatus", "ClientClosed", "ConnectFailed", "ConnectionLost", "Draining", "EmbeddedFailed", "EmbeddedService",
    "Endpoint", "Event", "ExecutionResult", "Fault", "FileEntry", "FileError", "FileNotFound", "Forbidden", "GathererStatistics", "InternalError",
    "InvalidRequest", "Lease", "LeaseInfo", "LeaseLost", "LeaseNotFound", "LeasePage", "MethodNotAllowed", "NoCapacity", "NotImplementedYet", "Output",
    "Page", "PayloadTooLarge", "PoolChange", "PoolConflict", "PoolInfo", "PoolNotFound", "PortAddress", "PortClosed", "Program", "ProgramResult",
    "QuotaExceeded", "Readiness", "Reason", "Released",
    "RemoteToolBackend", "Renewed", "Result", "RetryPolicy", "RouteNotFound", "SandboxClient", "SandboxError", "SandboxInfo", "SandboxLost",
    "SandboxNotFound", "ServiceError", "ServiceNotFound", "Slot", "SlotCheck", "SlotTools", "StorageUnavailable", "TimedOut", "TransportError",
    "Unauthorized", "VerifyReport", "__version__", "available_tools", "embedded", "find_service", "render_tool_reply", "tool_schemas",
]  # fmt: skip

#: The closed set of error codes in the HTTP contract.
CODES = {
    "unauthorized", "forbidden", "not_found", "pool_not_found", "sandbox_not_found", "lease_not_found", "file_not_found", "call_not_found",
    "method_not_allowed", "pool_conflict", "call_conflict", "file_error", "lease_lost", "sandbox_lost", "payload_too_large", "invalid_request",
    "quota_exceeded", "internal", "not_implemented", "port_closed", "no_capacity", "draining", "backend_unavailable", "storage_unavailable",
}  # fmt: skip


def test_exports_exactly_these_names() -> None:
    assert sorted(EXPORTED) == sorted(env_client.__all__)
    assert all(hasattr(env_client, name) for name in EXPORTED)


def test_each_code_of_the_contract_has_its_own_class() -> None:
    assert errors.CLASS_OF_CODE.keys() == CODES
    assert len(CODES) == len(set(errors.CLASS_OF_CODE.values()))
    assert all(issubclass(error, errors.ServiceError) and error.__doc__ for error in errors.CLASS_OF_CODE.values())


def test_the_service_knows_the_same_codes() -> None:
    def codes(error: type[PoolServiceError]) -> set[str]:
        return {error.code}.union(*[codes(sub) for sub in error.__subclasses__()])

    assert codes(PoolServiceError) == CODES


def test_every_error_is_a_sandbox_error() -> None:
    raised = [found for _, found in inspect.getmembers(errors, inspect.isclass) if issubclass(found, Exception)]

    assert all(issubclass(error, errors.SandboxError) for error in raised)


def test_the_library_depends_on_httpx_and_the_standard_library_alone() -> None:
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in {"cli", "demo.py", "demo_project"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.partition(".")[0]
                assert top in {"env_client", "httpx"} or top in sys.stdlib_module_names, f"{path.name} imports {name}"


@pytest.mark.parametrize(("one", "other"), [(AsyncSandboxClient, SandboxClient), (AsyncLease, Lease)])
def test_both_clients_have_the_same_methods_with_the_same_arguments(one: type, other: type) -> None:
    def operations(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name.replace("aclose", "close"): list(inspect.signature(verb).parameters) for name, verb in found if not name.startswith("_")}

    assert operations(one) == operations(other)


def test_an_error_survives_being_sent_to_another_process() -> None:
    error = errors.NoCapacity("none free", status=503, request_id="r-1", retry_after_s=2.0, extra={"queue_position": 3})
    again = pickle.loads(pickle.dumps(error))

    assert (error.detail, 503, "no_capacity", "r-1", 2.0, {"queue_position": 3}) == (
        again.detail, again.status, again.code, again.request_id, again.retry_after_s, again.extra,
    )  # fmt: skip

"""Renders values as the JSON of the contract. `responses` has the models of what this makes."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any

import orjson
from starlette.responses import Response

from sandbox_server.api.contract.specs import shown_spec
from sandbox_server.api.tenants import Tenant
from sandbox_server.core.execution import Result
from sandbox_server.core.types import ClaimantView, Lease, PoolView, SandboxView

JSON_TYPE = "application/json"
BYTES_TYPE = "application/octet-stream"
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def dumps(document: Any) -> bytes:
    """Encode a value as JSON in UTF-8. Characters that UTF-8 cannot encode, such as a lone surrogate in a file name, become U+FFFD."""
    try:
        return orjson.dumps(document, default=_plain)
    except TypeError:
        return orjson.dumps(_clean(document), default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | set | frozenset):
        return list(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return LONE_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
    if isinstance(value, Mapping):
        return {_clean(str(key)): _clean(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_clean(child) for child in value]
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 64:
        return float(value)
    return value


def json_response(document: Any, status: int = 200) -> Response:
    """A response whose body is JSON."""
    return Response(dumps(document), status_code=status, media_type=JSON_TYPE)


def lease_document(lease: Lease) -> dict[str, Any]:
    """The JSON of a lease."""
    return {
        "lease_id": lease.lease_id,
        "epoch": lease.epoch,
        "pool": lease.pool,
        "sandbox_id": lease.sandbox_id,
        "slot_id": lease.slot.name,
        "trajectory_id": lease.trajectory_id,
        "run_id": lease.run_id,
        "tenant": lease.tenant,
        "state": lease.state.value,
        "acquired_at": lease.acquired_at,
        "expires_at": lease.expires_at,
        "sandbox_ends_at": lease.sandbox_ends_at,
        "workspace": lease.workspace,
        "workspace_kept": lease.workspace_kept,
        "isolation": lease.isolation,
        "allow_network": lease.allow_network,
        "cache": lease.cache,
        "labels": dict(lease.labels),
        **({"read_only": list(lease.read_only)} if lease.read_only else {}),
        **({"allow_hosts": list(lease.allow_hosts)} if lease.allow_hosts is not None else {}),
    }


def result_document(result: Result) -> dict[str, Any]:
    """The JSON of a result, with its output in the encoding that the call asked for."""
    metadata = dict(result.metadata)
    if result.stdout is not None or result.stderr is not None:
        metadata["stdout"] = _text(result.stdout or b"", result.encoding)
        metadata["stderr"] = _text(result.stderr or b"", result.encoding)
    return {
        "call_id": result.call_id,
        "lease_id": result.lease_id,
        "success": result.success,
        "exit_code": result.exit_code,
        "reason": result.reason,
        "fault": result.fault,
        "output": _text(result.output, result.encoding),
        "error": result.error,
        "output_bytes": result.output_bytes,
        "truncated": result.truncated,
        "encoding": result.encoding,
        "started_at": result.started_at,
        "duration_s": result.duration_s,
        "cpu_s": result.cpu_s,
        "max_rss_bytes": result.max_rss_bytes,
        "metadata": metadata,
    }


def _text(data: bytes, encoding: str) -> str:
    return base64.b64encode(data).decode("ascii") if encoding == "base64" else data.decode("utf-8", "replace")


def pool_document(view: PoolView, tenant: Tenant) -> dict[str, Any]:
    """The JSON of a pool. Only admins see its `env_vars`, and to which tenant a waiting acquire belongs that is not their own."""
    return {
        "name": view.name,
        "tenant": view.tenant,
        "shared": view.shared,
        "state": view.state.value,
        "spec": shown_spec(view.spec, admin=tenant.admin),
        "origin": view.origin,
        "isolation": view.isolation,
        "capabilities": dict(view.capabilities),
        "effective": dict(view.effective),
        "slots": dict(view.slots),
        "sandboxes": dict(view.sandboxes),
        "queue": view.queue,
        "claimant": None if view.claimant is None else _claimant_document(view.claimant, tenant),
        "last_error": view.last_error,
    }


def _claimant_document(view: ClaimantView, tenant: Tenant) -> dict[str, Any]:
    document: dict[str, Any] = {"count": view.count, "held_slots": view.held_slots, "waited_s": view.waited_s}
    if tenant.admin or tenant.name == view.tenant:
        document |= {"tenant": view.tenant, "run_id": view.run_id}
    return document


def sandbox_document(view: SandboxView) -> dict[str, Any]:
    """The JSON of a sandbox."""
    return {
        "sandbox_id": view.sandbox_id,
        "pool": view.pool,
        "pool_tenant": view.pool_tenant,
        "backend": view.backend,
        "state": view.state.value,
        "isolation": view.isolation,
        "slots": dict(view.slots),
        "created_at": view.created_at,
        "ends_at": view.ends_at,
        "last_error": view.last_error,
    }

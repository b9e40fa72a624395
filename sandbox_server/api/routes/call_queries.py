"""The routes for calls that have been started: their state, their events, their whole output."""

from __future__ import annotations

import re

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.call_events import call_events
from sandbox_server.api.contract.describe import BINARY, CALL_ID, LAST_EVENT_ID, LEASE_ID, TEXT, WITH_LEASE, WITH_TOKEN, RawRoute, describe_route, parameter
from sandbox_server.api.contract.parse import last_event_id, offset_of, query, wait_of
from sandbox_server.api.contract.render import BYTES_TYPE, JSON_TYPE, json_response, result_document
from sandbox_server.api.contract.requests import CALL_ID_PATTERN
from sandbox_server.api.contract.responses import CallAnswer
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.result_pieces import enclosed, whole_response
from sandbox_server.api.streams import EVENT_STREAM_TYPE, EventStreamResponse, StreamResponse
from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.errors import CallNotFound
from sandbox_server.core.execution import Result

router = APIRouter(route_class=RawRoute, tags=["calls"])

CODES = (*WITH_TOKEN, *WITH_LEASE, "call_not_found", "invalid_request", "not_implemented", "backend_unavailable")
OFFSET = parameter("offset", {"type": "integer", "minimum": 0}, "the offset in the output to start from, in bytes")
WAIT_S = parameter("wait_s", {"type": "number", "minimum": 0, "maximum": 3600, "default": 0}, "how long to wait for the end of the call, in seconds")
TOTAL_HEADER = "x-output-bytes"


def _call_of_path(request: Request) -> tuple[str, str, str]:
    """The tenant, the lease id and the call id of a request."""
    lease_id, call_id = request.path_params["lease_id"], request.path_params["call_id"]
    if not re.fullmatch(CALL_ID_PATTERN, call_id):
        raise CallNotFound(f"lease {lease_id} has no call with that id: it is not a valid call id")
    return tenant_of(request).name, lease_id, call_id


@router.get(
    "/v1/leases/{lease_id}/calls/{call_id}",
    **describe_route("Get the state of a call", codes=(*CODES, "quota_exceeded", "draining"), parameters=(LEASE_ID, CALL_ID, WAIT_S), response=CallAnswer),
)
async def get_call(request: Request) -> Response:
    """Get the state of a call: running, or done with its result. With `wait_s`, wait for its end."""
    service = service_of(request)
    tenant, lease_id, call_id = _call_of_path(request)
    wait_s = wait_of(query(request, ("wait_s",)).get("wait_s"), service.limits)
    found = await service.call_queries.call_status(tenant, lease_id, call_id, wait_s)
    if isinstance(found, Result):
        whole = whole_response(found, lambda result: {"state": "done", "result": result_document(result)})
        if whole is not None:
            return whole
        reservation = await service.dispatcher.response_budget.reserve_stream(tenant, service.call_queries.output_file_bytes(lease_id, call_id, found))
        pieces = enclosed(b'{"state":"done","result":', found, b"}")
        return StreamResponse(pieces, JSON_TYPE, stall_s=service.limits.answer_stall_s, on_end=reservation.release)
    return json_response({"state": "running", "output_bytes": found.output_bytes, "started_at": found.started_at})


@router.get(
    "/v1/leases/{lease_id}/calls/{call_id}/events",
    **describe_route(
        "Stream the output of a call, and its result, as events",
        codes=(*CODES, "quota_exceeded", "draining"),
        parameters=(LEASE_ID, CALL_ID, OFFSET, LAST_EVENT_ID),
        content={EVENT_STREAM_TYPE: {"schema": TEXT}},
    ),
)
async def get_events(request: Request) -> Response:
    """Stream the events of a call again, from `Last-Event-ID`, else from the offset."""
    service = service_of(request)
    tenant, lease_id, call_id = _call_of_path(request)
    offset = offset_of(query(request, ("offset",)).get("offset"))
    last = last_event_id(request)
    offset, name = (offset, "offset") if last is None else (last, "Last-Event-ID")
    found = await service.call_queries.check_offset(tenant, lease_id, call_id, offset, name)
    reservation = await service.dispatcher.response_budget.reserve_stream(tenant, service.call_queries.output_file_bytes(lease_id, call_id, found))
    return EventStreamResponse(
        call_events(service.call_queries, tenant, lease_id, call_id, offset), service, tenant, ends_with_service=True, on_end=reservation.release
    )


@router.get(
    "/v1/leases/{lease_id}/calls/{call_id}/output",
    **describe_route(
        "Get the whole output of a call",
        codes=(*CODES, "quota_exceeded", "draining"),
        parameters=(LEASE_ID, CALL_ID, OFFSET),
        content={BYTES_TYPE: {"schema": BINARY}},
    ),
)
async def get_output(request: Request) -> Response:
    """Get the output of a call, as far as it is kept. For a running call this is the output so far."""
    service = service_of(request)
    tenant, lease_id, call_id = _call_of_path(request)
    offset = offset_of(query(request, ("offset",)).get("offset"))
    reservation = await service.dispatcher.response_budget.reserve_stream(tenant)
    with cleanup_on_failure(reservation.release):
        output = await service.call_queries.fetch_output(tenant, lease_id, call_id, offset)
    headers = {} if output.total_bytes is None else {TOTAL_HEADER: str(output.total_bytes)}
    return StreamResponse(output.chunks, BYTES_TYPE, headers, stall_s=service.limits.answer_stall_s, on_end=reservation.release)

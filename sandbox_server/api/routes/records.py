"""Calls looked at again: where one is, its events, its whole output."""

from __future__ import annotations

import re

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.call_events import call_events
from sandbox_server.api.contract.describe import BINARY, CALL_ID, LAST_EVENT_ID, LEASE_ID, TEXT, WITH_LEASE, WITH_TOKEN, RawRoute, described, parameter
from sandbox_server.api.contract.parse import last_event_id, offset_of, query, wait_of
from sandbox_server.api.contract.render import JSON_TYPE, json_response, result_document
from sandbox_server.api.contract.requests import CALL_ID_PATTERN
from sandbox_server.api.contract.responses import CallAnswer
from sandbox_server.api.result_pieces import enclosed, whole_response
from sandbox_server.api.service import service_of, tenant_of
from sandbox_server.api.streams import EVENT_STREAM_TYPE, EventStream, Stream
from sandbox_server.core.errors import CallNotFound
from sandbox_server.core.execution import Result

router = APIRouter(route_class=RawRoute, tags=["calls"])

CODES = (*WITH_TOKEN, *WITH_LEASE, "call_not_found", "invalid_request", "not_implemented", "backend_unavailable")
OFFSET = parameter("offset", {"type": "integer", "minimum": 0}, "from this byte of the output on")
WAIT_S = parameter("wait_s", {"type": "number", "minimum": 0, "maximum": 3600, "default": 0}, "wait at most so long for its end")
BYTES_TYPE = "application/octet-stream"
TOTAL_HEADER = "x-output-bytes"


def _call(request: Request) -> tuple[str, str, str]:
    lease_id, call_id = request.path_params["lease_id"], request.path_params["call_id"]
    if not re.fullmatch(CALL_ID_PATTERN, call_id):
        raise CallNotFound(f"lease {lease_id} has no call of that id: no call can have it")
    return tenant_of(request).name, lease_id, call_id


@router.get(
    "/v1/leases/{lease_id}/calls/{call_id}",
    **described("Where a call is", codes=(*CODES, "quota_exceeded", "draining"), parameters=(LEASE_ID, CALL_ID, WAIT_S), answer=CallAnswer),
)
async def get_call(request: Request) -> Response:
    """Running, or done with its result; waits for its end where asked to."""
    service = service_of(request)
    tenant, lease_id, call_id = _call(request)
    wait_s = wait_of(query(request, ("wait_s",)).get("wait_s"), service.limits)
    found = await service.records.call_status(tenant, lease_id, call_id, wait_s)
    if isinstance(found, Result):
        whole = whole_response(found, lambda result: {"state": "done", "result": result_document(result)})
        if whole is not None:
            return whole
        reservation = await service.dispatcher.answer_budget.reserve_stream(tenant, service.records.output_file_bytes(lease_id, call_id, found))
        pieces = enclosed(b'{"state":"done","result":', found, b"}")
        return Stream(pieces, JSON_TYPE, stall_s=service.limits.answer_stall_s, ended=reservation.release)
    return json_response({"state": "running", "output_bytes": found.output_bytes, "started_at": found.started_at})


@router.get(
    "/v1/leases/{lease_id}/calls/{call_id}/events",
    **described(
        "The output of a call as events, and its result",
        codes=(*CODES, "quota_exceeded", "draining"),
        parameters=(LEASE_ID, CALL_ID, OFFSET, LAST_EVENT_ID),
        content={EVENT_STREAM_TYPE: {"schema": TEXT}},
    ),
)
async def get_events(request: Request) -> Response:
    """The event stream again, from `Last-Event-ID`, else from the offset."""
    service = service_of(request)
    tenant, lease_id, call_id = _call(request)
    offset = offset_of(query(request, ("offset",)).get("offset"))
    last = last_event_id(request)
    offset, name = (offset, "offset") if last is None else (last, "Last-Event-ID")
    found = await service.records.check_offset(tenant, lease_id, call_id, offset, name)
    reservation = await service.dispatcher.answer_budget.reserve_stream(tenant, service.records.output_file_bytes(lease_id, call_id, found))
    return EventStream(call_events(service.records, tenant, lease_id, call_id, offset), service, tenant, ends_at_once=True, ended=reservation.release)


@router.get(
    "/v1/leases/{lease_id}/calls/{call_id}/output",
    **described(
        "The whole output of a call",
        codes=(*CODES, "quota_exceeded", "draining"),
        parameters=(LEASE_ID, CALL_ID, OFFSET),
        content={BYTES_TYPE: {"schema": BINARY}},
    ),
)
async def get_output(request: Request) -> Response:
    """Every byte it wrote, as far as it is kept; of a call that runs, what there is so far."""
    service = service_of(request)
    tenant, lease_id, call_id = _call(request)
    offset = offset_of(query(request, ("offset",)).get("offset"))
    reservation = await service.dispatcher.answer_budget.reserve_stream(tenant)
    try:
        output = await service.records.fetch_output(tenant, lease_id, call_id, offset)
    except BaseException:
        reservation.release()
        raise
    headers = {} if output.total_bytes is None else {TOTAL_HEADER: str(output.total_bytes)}
    return Stream(output.chunks, BYTES_TYPE, headers, stall_s=service.limits.answer_stall_s, ended=reservation.release)

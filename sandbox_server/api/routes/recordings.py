"""The route for the recordings of terminals."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import LEASE_ID, TEXT, WITH_LEASE, WITH_TOKEN, RawRoute, describe_route, parameter
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.streams import StreamResponse

router = APIRouter(route_class=RawRoute, tags=["calls"])

CODES = (*WITH_TOKEN, *WITH_LEASE, "file_not_found", "file_error", "invalid_request", "quota_exceeded", "not_implemented", "backend_unavailable")
ASCIICAST_TYPE = "application/x-asciicast"
NAME = parameter("name", {"type": "string", "minLength": 1}, "the name of the recording: `metadata.recording` of a result", location="path", required=True)


@router.get(
    "/v1/leases/{lease_id}/recordings/{name}",
    **describe_route("Get the recording of a terminal", codes=CODES, parameters=(LEASE_ID, NAME), content={ASCIICAST_TYPE: {"schema": TEXT}}),
)
async def get_recording(request: Request) -> Response:
    """Get a recording as far as it exists now: an asciicast of version 2."""

    def announce_size(size_bytes: int) -> None:
        response.announce_size(size_bytes)  # the response exists by then, because it reads the recording

    service, tenant = service_of(request), tenant_of(request).name
    content = service.files.read_recording(tenant, request.path_params["lease_id"], request.path_params["name"], announce_size)
    reservation = await service.dispatcher.response_budget.reserve_stream(tenant)
    response = StreamResponse(content, ASCIICAST_TYPE, stall_s=service.limits.answer_stall_s, on_end=reservation.release)
    return response

"""The routes for sandboxes: list them, drain one."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import WITH_TOKEN, RawRoute, describe_route, parameter
from sandbox_server.api.contract.parse import query
from sandbox_server.api.contract.render import json_response, sandbox_document
from sandbox_server.api.contract.responses import SandboxAnswer, SandboxesAnswer
from sandbox_server.api.paging import PAGE_NAMES, PAGE_PARAMETERS, PageRequest, page_document
from sandbox_server.api.request_context import actor_of, check_admin, service_of

router = APIRouter(route_class=RawRoute, tags=["sandboxes"])

SANDBOX_ID = parameter("sandbox_id", {"type": "string", "minLength": 1}, "a sandbox", location="path", required=True)


@router.get("/v1/sandboxes", **describe_route("List sandboxes", codes=(*WITH_TOKEN, "invalid_request"), parameters=PAGE_PARAMETERS, response=SandboxesAnswer))
async def list_sandboxes(request: Request) -> Response:
    """List the sandboxes of the pools that the tenant can use, with the states of their slots."""
    service = service_of(request)
    page = PageRequest.of(query(request, PAGE_NAMES), service.limits)
    views, cursor = page.cut(service.pools.sandboxes(actor=actor_of(request)), lambda view: view.sandbox_id)
    return json_response(page_document("sandboxes", [sandbox_document(view) for view in views], cursor))


@router.post(
    "/v1/sandboxes/{sandbox_id}/drain",
    **describe_route(
        "Drain a sandbox",
        codes=(*WITH_TOKEN, "forbidden", "sandbox_not_found", "storage_unavailable"),
        status=202,
        parameters=(SANDBOX_ID,),
        response=SandboxAnswer,
    ),
)
async def drain_sandbox(request: Request) -> Response:
    """Drain a sandbox: it gives no new leases and is destroyed when its last lease has ended. The pool creates another one if it needs one."""
    check_admin(request, "drain sandboxes")
    view = await service_of(request).pools.drain_sandbox(request.path_params["sandbox_id"], actor=actor_of(request))
    return json_response(sandbox_document(view), 202)

"""The routes for health checks: whether the process responds, and whether leases can be acquired."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import ALWAYS, RawRoute, describe_route, json_content, parameter
from sandbox_server.api.contract.parse import query
from sandbox_server.api.contract.render import json_response
from sandbox_server.api.contract.responses import HealthAnswer, ReadyAnswer
from sandbox_server.api.request_context import service_of
from sandbox_server.core.errors import PoolNotFound

router = APIRouter(route_class=RawRoute, tags=["service"])

POOL = parameter("pool", {"type": "string"}, "report on this pool alone")


@router.get("/healthz", **describe_route("Whether the process responds", codes=ALWAYS, response=HealthAnswer))
async def healthz(request: Request) -> Response:
    """Report that the process responds to requests."""
    return json_response({"status": "ok"})


@router.get(
    "/readyz",
    **describe_route(
        "Whether leases can be acquired",
        codes=(*ALWAYS, "invalid_request", "pool_not_found"),
        parameters=(POOL,),
        response=ReadyAnswer,
        also={503: {"description": "Not ready", "content": json_content(ReadyAnswer)}},
    ),
)
async def readyz(request: Request) -> Response:
    """Report whether every pool of the settings file has its minimum or a permanent error, and whether the state can be recorded: 200 if so, else 503."""
    asked = query(request, ("pool",))
    service = service_of(request)
    storage_problem = service.storage_problem()
    readiness = {**service.pools.readiness(), "storage": {"ready": storage_problem is None, "last_error": storage_problem}, "warnings": service.warnings}
    ready = bool(readiness.get("ready")) and storage_problem is None
    name = asked.get("pool")
    if name is not None:
        pools = readiness.get("pools", {})
        if name not in pools:
            raise PoolNotFound(f"there is no pool {name}")
        readiness["pools"] = {name: pools[name]}
        ready = bool(pools[name].get("ready")) and storage_problem is None
    readiness["ready"] = ready
    response = json_response(readiness, 200 if ready else 503)
    if not ready:
        response.headers["retry-after"] = "1"
    return response

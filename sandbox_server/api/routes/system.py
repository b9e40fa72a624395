"""The service itself: alive, ready."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import ALWAYS, RawRoute, described, json_content, parameter
from sandbox_server.api.contract.parse import query
from sandbox_server.api.contract.render import json_response
from sandbox_server.api.contract.responses import HealthAnswer, ReadyAnswer
from sandbox_server.api.service import service_of
from sandbox_server.core.errors import PoolNotFound

router = APIRouter(route_class=RawRoute, tags=["service"])

POOL = parameter("pool", {"type": "string"}, "only this pool has to be ready")


@router.get("/healthz", **described("Whether the process answers", codes=ALWAYS, answer=HealthAnswer))
async def healthz(request: Request) -> Response:
    """The process answers."""
    return json_response({"status": "ok"})


@router.get(
    "/readyz",
    **described(
        "Whether leases can be had",
        codes=(*ALWAYS, "invalid_request", "pool_not_found"),
        parameters=(POOL,),
        answer=ReadyAnswer,
        also={503: {"description": "not yet", "content": json_content(ReadyAnswer)}},
    ),
)
async def readyz(request: Request) -> Response:
    """200 once every pool of the settings file has its minimum or a shown permanent error and the state can be recorded, else 503; the body says all."""
    asked = query(request, ("pool",))
    service = service_of(request)
    trouble = service.storage_trouble()
    readiness = {**service.pools.readiness(), "storage": {"ready": trouble is None, "last_error": trouble}, "warnings": service.warnings}
    ready = bool(readiness.get("ready")) and trouble is None
    name = asked.get("pool")
    if name is not None:
        pools = readiness.get("pools", {})
        if name not in pools:
            raise PoolNotFound(f"there is no pool {name}")
        readiness["pools"] = {name: pools[name]}
        ready = bool(pools[name].get("ready")) and trouble is None
    readiness["ready"] = ready
    response = json_response(readiness, 200 if ready else 503)
    if not ready:
        response.headers["retry-after"] = "1"
    return response

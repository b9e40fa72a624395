"""Routes of the contract that are not built yet: they say so."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.describe import ALWAYS, CALL_ID, LEASE_ID, WITH_TOKEN, RawRoute, described, parameter
from sandbox_server.core.errors import NotImplementedHere

router = APIRouter(route_class=RawRoute, tags=["not built yet"])

POOL_NAME = parameter("name", {"type": "string", "minLength": 1}, "a pool", where="path", required=True)
SANDBOX_ID = parameter("sandbox_id", {"type": "string", "minLength": 1}, "a sandbox", where="path", required=True)

PENDING = (
    ("POST", "/v1/leases/{lease_id}/narrow", "Take rights away from a held slot", (LEASE_ID,)),
    ("GET", "/v1/leases/{lease_id}/calls/{call_id}", "Where a call is", (LEASE_ID, CALL_ID)),
    ("GET", "/v1/leases/{lease_id}/calls/{call_id}/events", "The output of a call as events", (LEASE_ID, CALL_ID)),
    ("GET", "/v1/leases/{lease_id}/calls/{call_id}/output", "The whole output of a call", (LEASE_ID, CALL_ID)),
    ("GET", "/v1/leases/{lease_id}/terminal", "A terminal (WebSocket)", (LEASE_ID,)),
    ("PUT", "/v1/pools/{name}", "Make or change a pool", (POOL_NAME,)),
    ("DELETE", "/v1/pools/{name}", "Drain a pool away", (POOL_NAME,)),
    ("POST", "/v1/pools/{name}/verify", "Test the reset of a pool's slots", (POOL_NAME,)),
    ("GET", "/v1/sandboxes", "All sandboxes", ()),
    ("POST", "/v1/sandboxes/{sandbox_id}/drain", "Drain a sandbox", (SANDBOX_ID,)),
    ("GET", "/v1/events", "Everything that changes, as events", ()),
    ("GET", "/metrics", "Figures for Prometheus", ()),
    ("GET", "/v1/agent.pyz", "The agent", ()),
    ("GET", "/", "The page", ()),
    ("GET", "/docs", "The page of the OpenAPI document", ()),
)
OPEN = frozenset({"/", "/docs", "/v1/agent.pyz"})


async def not_built(request: Request) -> Response:
    """Say that there is nothing here yet."""
    raise NotImplementedHere(f"{request.method} {request.scope['route'].path} is not built yet")


for _method, _path, _summary, _parameters in PENDING:
    _codes = (*(ALWAYS if _path in OPEN else WITH_TOKEN), "not_implemented")
    router.add_api_route(
        _path, not_built, methods=[_method], name=f"{_method} {_path}", **described(_summary, codes=_codes, status=501, parameters=_parameters)
    )

"""Pools, to look at."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.describe import WITH_TOKEN, RawRoute, described, parameter
from sandbox_server.api.render import json_response, pool_document
from sandbox_server.api.schemas import PoolAnswer, PoolsAnswer
from sandbox_server.api.service import service_of, tenant_of

router = APIRouter(route_class=RawRoute, tags=["pools"])

NAME = parameter("name", {"type": "string", "minLength": 1}, "a pool", where="path", required=True)


@router.get("/v1/pools", **described("All pools", codes=WITH_TOKEN, answer=PoolsAnswer))
async def list_pools(request: Request) -> Response:
    """Every pool and what it holds now."""
    admin = tenant_of(request).admin
    return json_response({"pools": [pool_document(view, admin=admin) for view in service_of(request).pools.views()]})


@router.get("/v1/pools/{name}", **described("One pool", codes=(*WITH_TOKEN, "pool_not_found"), parameters=(NAME,), answer=PoolAnswer))
async def get_pool(request: Request) -> Response:
    """One pool and what it holds now."""
    view = service_of(request).pools.view(request.path_params["name"])
    return json_response(pool_document(view, admin=tenant_of(request).admin))

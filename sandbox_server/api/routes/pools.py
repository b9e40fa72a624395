"""Pools: look at them, make and change them, drain them away, test their reset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.answers import PoolAnswer, PoolsAnswer, VerifyAnswer
from sandbox_server.api.body import read_object
from sandbox_server.api.describe import WITH_BODY, WITH_TOKEN, RawRoute, described, json_content, parameter
from sandbox_server.api.limits import too_much_at_once
from sandbox_server.api.paging import PAGE_NAMES, PAGE_PARAMETERS, Page, page_document
from sandbox_server.api.parse import checked, flag, query
from sandbox_server.api.render import json_response, pool_document
from sandbox_server.api.schemas import PoolSpecBody
from sandbox_server.api.service import Service, check_admin, service_of, tenant_of
from sandbox_server.api.specs import POOL_NAME, check_may_set, spec_of, spec_problem
from sandbox_server.core.errors import InvalidRequest, PoolNotFound
from sandbox_server.core.types import PoolSpec

router = APIRouter(route_class=RawRoute, tags=["pools"])

NAME = parameter("name", {"type": "string", "pattern": POOL_NAME}, "a pool", where="path", required=True)
FORCE = parameter("force", {"type": "string", "enum": ["0", "1"]}, "end its leases now instead of waiting for them")
CHANGE_CODES = (*WITH_TOKEN, "forbidden", "invalid_request", "pool_conflict", "not_implemented", "draining", "backend_unavailable", "storage_unavailable")


@router.get("/v1/pools", **described("All pools", codes=(*WITH_TOKEN, "invalid_request"), parameters=PAGE_PARAMETERS, answer=PoolsAnswer))
async def list_pools(request: Request) -> Response:
    """Every pool and what it holds now."""
    service = service_of(request)
    page = Page.of(query(request, PAGE_NAMES), service.limits)
    caller = tenant_of(request)
    views, cursor = page.cut(service.pools.views(), lambda view: view.name)
    return json_response(page_document("pools", [pool_document(view, caller) for view in views], cursor))


@router.get("/v1/pools/{name}", **described("One pool", codes=(*WITH_TOKEN, "pool_not_found"), parameters=(NAME,), answer=PoolAnswer))
async def get_pool(request: Request) -> Response:
    """One pool and what it holds now."""
    view = service_of(request).pools.view(request.path_params["name"])
    return json_response(pool_document(view, tenant_of(request)))


@router.put(
    "/v1/pools/{name}",
    **described(
        "Make or change a pool",
        codes=(*CHANGE_CODES, *WITH_BODY, "quota_exceeded"),
        parameters=(NAME,),
        body=PoolSpecBody,
        answer=PoolAnswer,
        also={201: {"description": "Made", "content": json_content(PoolAnswer)}},
    ),
)
async def put_pool(request: Request) -> Response:
    """Give a pool this spec; what is not in it has its default."""
    service = service_of(request)
    name = _name(request)
    document = await read_object(request, service.limits)
    body = checked(PoolSpecBody, document)
    problem = spec_problem(body, service.limits)
    if problem is not None:
        raise InvalidRequest(problem, field=problem.partition(":")[0])
    service.check_not_stopping()
    now = _spec_now(service, name)
    if now is None and len(service.pools.views()) >= service.limits.pools:
        raise too_much_at_once(service.limits, "pools")
    tenant = tenant_of(request)
    if not tenant.admin:
        check_may_set(spec_of(body), now, gives_env_vars="env_vars" in document)
    view, made = await service.pools.put_pool(name, spec_of(body))
    return json_response(pool_document(view, tenant), 201 if made else 200)


def _name(request: Request) -> str:
    name: str = request.path_params["name"]
    if not re.fullmatch(POOL_NAME, name):
        raise InvalidRequest("name: must be 1 to 64 of a-z, 0-9, `.`, `_` and `-`, with a letter or digit at both ends", field="name")
    return name


def _spec_now(service: Service, name: str) -> PoolSpec | None:
    try:
        return service.pools.view(name).spec
    except PoolNotFound:
        return None


@router.delete(
    "/v1/pools/{name}",
    **described("Drain a pool away", codes=(*CHANGE_CODES, "pool_not_found"), status=202, parameters=(NAME, FORCE)),
)
async def delete_pool(request: Request) -> Response:
    """Give no new leases; the pool goes with its last one, or now."""
    service = service_of(request)
    check_admin(request, "delete pools")
    asked = query(request, ("force",))
    await service.pools.delete_pool(request.path_params["name"], force=flag(asked.get("force"), "force"))
    return Response(status_code=202)


@router.post(
    "/v1/pools/{name}/verify",
    **described(
        "Test the reset of a pool's slots",
        codes=(*CHANGE_CODES, "pool_not_found", "no_capacity"),
        parameters=(NAME,),
        answer=VerifyAnswer,
    ),
)
async def verify_pool(request: Request) -> Response:
    """Plant leftovers of every kind in free slots, reset them, and report what was found."""
    service = service_of(request)
    check_admin(request, "verify pools")
    service.check_not_stopping()
    report: Mapping[str, Any] = await service.pools.verify(request.path_params["name"])
    return json_response(dict(report))

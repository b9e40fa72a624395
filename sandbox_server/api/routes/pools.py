"""The routes for pools: list, create, change, delete, and verify the reset of their slots."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.body import read_object
from sandbox_server.api.contract.describe import WITH_BODY, WITH_TOKEN, RawRoute, describe_route, json_content, parameter
from sandbox_server.api.contract.parse import flag, parse_body, query
from sandbox_server.api.contract.render import json_response, pool_document
from sandbox_server.api.contract.requests import PoolSpecBody
from sandbox_server.api.contract.responses import PoolAnswer, PoolsAnswer, VerifyAnswer
from sandbox_server.api.contract.specs import POOL_NAME, check_may_set, spec_of, spec_problem
from sandbox_server.api.paging import PAGE_NAMES, PAGE_PARAMETERS, PageRequest, page_document
from sandbox_server.api.request_context import actor_of, check_admin, service_of, tenant_of
from sandbox_server.core.errors import InvalidRequest
from sandbox_server.core.types import PoolSpec
from sandbox_server.pool.access import ALL_TENANTS

router = APIRouter(route_class=RawRoute, tags=["pools"])

NAME = parameter("name", {"type": "string", "pattern": POOL_NAME}, "a pool", location="path", required=True)
FORCE = parameter("force", {"type": "string", "enum": ["0", "1"]}, "1: end its leases now, instead of waiting until they end")
TENANT = parameter(
    "tenant", {"type": "string", "minLength": 1}, "the tenant that owns the pool, for admins; default: the tenant's own pool, else the shared one"
)
TENANTS = parameter(
    "tenant",
    {"type": "string", "minLength": 1},
    "the tenant whose pools to list, for admins; `*`: those of all tenants; default: its own and the shared ones",
)
CHANGE_CODES = (*WITH_TOKEN, "forbidden", "invalid_request", "pool_conflict", "not_implemented", "draining", "backend_unavailable", "storage_unavailable")


@router.get(
    "/v1/pools",
    **describe_route(
        "List the pools that the tenant can use",
        codes=(*WITH_TOKEN, "forbidden", "invalid_request"),
        parameters=(TENANTS, *PAGE_PARAMETERS),
        response=PoolsAnswer,
    ),
)
async def list_pools(request: Request) -> Response:
    """List the tenant's own pools and the shared ones, with their current state."""
    service, actor = service_of(request), actor_of(request)
    asked = query(request, ("tenant", *PAGE_NAMES))
    page = PageRequest.of(asked, service.limits)
    views, cursor = page.cut(service.pools.views(actor=actor, tenant=asked.get("tenant")), lambda view: f"{view.name}/{view.tenant or ''}")
    return json_response(page_document("pools", [pool_document(view, tenant_of(request)) for view in views], cursor))


@router.get(
    "/v1/pools/{name}",
    **describe_route("One pool", codes=(*WITH_TOKEN, "forbidden", "invalid_request", "pool_not_found"), parameters=(NAME, TENANT), response=PoolAnswer),
)
async def get_pool(request: Request) -> Response:
    """Get one pool with its current state."""
    actor = actor_of(request)
    view = service_of(request).pools.view(request.path_params["name"], actor=actor, tenant=_tenant(query(request, ("tenant",))))
    return json_response(pool_document(view, tenant_of(request)))


@router.put(
    "/v1/pools/{name}",
    **describe_route(
        "Create or change a pool",
        codes=(*CHANGE_CODES, *WITH_BODY),
        parameters=(NAME, TENANT),
        body=PoolSpecBody,
        response=PoolAnswer,
        also={201: {"description": "Created", "content": json_content(PoolAnswer)}},
    ),
)
async def put_pool(request: Request) -> Response:
    """Create a pool with this spec, or change its spec. A field that is not given has its default."""
    service = service_of(request)
    name = _name(request)
    document = await read_object(request, service.limits)
    body = parse_body(PoolSpecBody, document)
    problem = spec_problem(body, service.limits)
    if problem is not None:
        raise InvalidRequest(problem, field=problem.partition(":")[0])
    service.check_not_stopping()
    spec, tenant, owner = spec_of(body), tenant_of(request), _tenant(query(request, ("tenant",)))

    def check(now: PoolSpec | None) -> None:
        if now is None and owner is not None and not service.tenants.has_tenant(owner):
            raise InvalidRequest(f"tenant: there is no tenant {owner!r} that could own the pool", field="tenant")
        if not tenant.admin:
            check_may_set(spec, now, gives_env_vars="env_vars" in document, backends=tenant.backends)

    view, made = await service.pools.put_pool(name, spec, actor=actor_of(request), tenant=owner, check=check)
    return json_response(pool_document(view, tenant), 201 if made else 200)


def _name(request: Request) -> str:
    name: str = request.path_params["name"]
    if not re.fullmatch(POOL_NAME, name):
        raise InvalidRequest("name: must be 1 to 64 of a-z, 0-9, `.`, `_` and `-`, with a letter or digit at both ends", field="name")
    return name


def _tenant(asked: Mapping[str, str]) -> str | None:
    """The tenant that the query names; None if it names none."""
    tenant = asked.get("tenant")
    if tenant == ALL_TENANTS:
        raise InvalidRequest("tenant: must be one tenant's name here; `*` is for the list of pools", field="tenant")
    return tenant


@router.delete(
    "/v1/pools/{name}",
    **describe_route("Delete a pool", codes=(*CHANGE_CODES, "pool_not_found"), status=202, parameters=(NAME, TENANT, FORCE)),
)
async def delete_pool(request: Request) -> Response:
    """Delete a pool. It gives no new leases, and is gone when its last lease has ended, or at once with `force`."""
    service = service_of(request)
    asked = query(request, ("tenant", "force"))
    force = flag(asked.get("force"), "force")
    await service.pools.delete_pool(request.path_params["name"], actor=actor_of(request), tenant=_tenant(asked), force=force)
    return Response(status_code=202)


@router.post(
    "/v1/pools/{name}/verify",
    **describe_route(
        "Verify the reset of a pool's slots",
        codes=(*CHANGE_CODES, "pool_not_found", "no_capacity"),
        parameters=(NAME, TENANT),
        response=VerifyAnswer,
    ),
)
async def verify_pool(request: Request) -> Response:
    """Leave files and processes of every kind in free slots, reset the slots, and report what was found and removed."""
    service = service_of(request)
    check_admin(request, "verify pools")
    service.check_not_stopping()
    report: Mapping[str, Any] = await service.pools.verify(request.path_params["name"], actor=actor_of(request), tenant=_tenant(query(request, ("tenant",))))
    return json_response(dict(report))

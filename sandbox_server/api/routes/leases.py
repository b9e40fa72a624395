"""The routes for leases: acquire, release, renew, list, narrow."""

from __future__ import annotations

import asyncio
import logging

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.body import ClientDisconnected, read_object
from sandbox_server.api.contract.describe import LEASE_ID, WITH_BODY, WITH_LEASE, WITH_TOKEN, RawRoute, describe_route, parameter
from sandbox_server.api.contract.parse import acquire_request, parse_body, query
from sandbox_server.api.contract.render import json_response, lease_document
from sandbox_server.api.contract.requests import AcquireBody, NarrowBody, ReleaseBody, RenewBody
from sandbox_server.api.contract.responses import AcquireAnswer, LeaseAnswer, LeasesAnswer, ReleaseAnswer, RenewAnswer
from sandbox_server.api.limits import too_many
from sandbox_server.api.paging import PAGE_NAMES, PAGE_PARAMETERS, PageRequest, next_cursor, page_document
from sandbox_server.api.request_context import Service, service_of, tenant_of
from sandbox_server.api.streams import wait_for_disconnect
from sandbox_server.core.errors import InvalidRequest, Stopping, StorageUnavailable
from sandbox_server.core.types import Acquired, AcquireRequest

log = logging.getLogger(__name__)

router = APIRouter(route_class=RawRoute, tags=["leases"])

ACQUIRE_CODES = (
    *WITH_TOKEN,
    *WITH_BODY,
    "pool_not_found",
    "call_conflict",
    "lease_lost",
    "sandbox_lost",
    "not_implemented",
    "no_capacity",
    "draining",
    "backend_unavailable",
    "storage_unavailable",
)


@router.post("/v1/acquire", **describe_route("Acquire one slot, or a gang of them", codes=ACQUIRE_CODES, body=AcquireBody, response=AcquireAnswer))
async def acquire(request: Request) -> Response:
    """Acquire slots. Waits in the queue until they are granted, `wait_s` has passed, or the client closes the connection."""
    service = service_of(request)
    body = parse_body(AcquireBody, await read_object(request, service.limits))
    wanted = acquire_request(body, tenant_of(request).name, service.default_pool, service.limits)
    service.check_not_stopping()
    service.check_storage()
    acquired = await _acquire_unless_gone(service, request, wanted)
    return json_response({"leases": [lease_document(lease) for lease in acquired.leases], "waited_s": round(acquired.waited_s, 6)})


async def _acquire_unless_gone(service: Service, request: Request, wanted: AcquireRequest) -> Acquired:
    """Acquire slots, but leave the queue when the client closes the connection or the service stops. Slots granted too late are given back.

    Raises:
        ClientDisconnected: the client closed the connection.
        Stopping: the service is stopping.
    """
    granting = asyncio.create_task(service.pools.acquire(wanted))
    disconnected = asyncio.create_task(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((granting, disconnected, service.stopping), return_when=asyncio.FIRST_COMPLETED)
        if granting.done() and not disconnected.done():
            return granting.result()
    finally:
        disconnected.cancel()
        if not granting.done():
            granting.cancel()
            await asyncio.wait((granting,))
    if not granting.cancelled() and granting.exception() is None:
        service.pools.release_undelivered_leases(granting.result(), wanted.request_key)
    if disconnected.done() and not disconnected.cancelled():
        raise ClientDisconnected
    raise Stopping


@router.post("/v1/release", **describe_route("End leases and give their slots back", codes=(*WITH_TOKEN, *WITH_BODY), body=ReleaseBody, response=ReleaseAnswer))
async def release(request: Request) -> Response:
    """End leases at once. Their slots are reset afterwards."""
    service = service_of(request)
    body = parse_body(ReleaseBody, await read_object(request, service.limits))
    if [body.lease_ids, body.run_id, body.request_key].count(None) != 2:
        raise InvalidRequest("lease_ids: give lease_ids, run_id or request_key, one of them", field="lease_ids")
    _check_count(body.lease_ids, service)
    if body.run_id is not None:
        service.run_batches.cancel_run(tenant_of(request).name, body.run_id)
    released, unknown = service.pools.release(
        tenant_of(request).name, lease_ids=body.lease_ids, run_id=body.run_id, reset_workspace=body.reset_workspace, request_key=body.request_key
    )
    try:
        await service.flush()
    except StorageUnavailable:
        # The leases have ended. Only if the service is restarted now are they held again, until they expire.
        log.exception("releases could not be written to the store")
    return json_response({"released": list(released), "unknown": list(unknown)})


@router.post("/v1/renew", **describe_route("Extend leases", codes=(*WITH_TOKEN, *WITH_BODY, "storage_unavailable"), body=RenewBody, response=RenewAnswer))
async def renew(request: Request) -> Response:
    """Extend leases. The end of a lease is never brought forward."""
    service = service_of(request)
    body = parse_body(RenewBody, await read_object(request, service.limits))
    _check_count(body.lease_ids, service)
    leases, lost = service.pools.renew(tenant_of(request).name, body.lease_ids, body.ttl_s)
    await service.flush()
    return json_response(
        {
            "leases": [lease_document(lease) for lease in leases],
            "lost": [{"lease_id": error.extra.get("lease_id"), "code": error.code, "detail": error.detail} for error in lost],
        }
    )


def _check_count(lease_ids: list[str] | None, service: Service) -> None:
    if lease_ids is not None and len(lease_ids) > service.limits.lease_ids:
        raise too_many(service.limits, "lease_ids", "lease_ids")


LIST_PARAMETERS = (
    parameter("run_id", {"type": "string"}, "only the leases of this run"),
    parameter("trajectory_id", {"type": "string"}, "only the leases of this trajectory"),
    *PAGE_PARAMETERS,
)


@router.get(
    "/v1/leases", **describe_route("List the leases that are held", codes=(*WITH_TOKEN, "invalid_request"), parameters=LIST_PARAMETERS, response=LeasesAnswer)
)
async def list_leases(request: Request) -> Response:
    """List the tenant's leases, one page at a time."""
    service = service_of(request)
    asked = query(request, ("run_id", "trajectory_id", *PAGE_NAMES))
    page = PageRequest.of(asked, service.limits)
    leases, last = service.pools.leases(
        tenant_of(request).name, run_id=asked.get("run_id"), trajectory_id=asked.get("trajectory_id"), limit=page.limit, cursor=page.after
    )
    cursor = None if last is None else next_cursor(last)
    return json_response(page_document("leases", [lease_document(lease) for lease in leases], cursor))


@router.get("/v1/leases/{lease_id}", **describe_route("One lease", codes=(*WITH_TOKEN, *WITH_LEASE), parameters=(LEASE_ID,), response=LeaseAnswer))
async def get_lease(request: Request) -> Response:
    """Get a lease that is held."""
    return json_response(lease_document(service_of(request).pools.lease(tenant_of(request).name, request.path_params["lease_id"])))


@router.post(
    "/v1/leases/{lease_id}/narrow",
    **describe_route(
        "Take rights away from a held slot",
        codes=(*WITH_TOKEN, *WITH_BODY, *WITH_LEASE, "not_implemented", "draining", "backend_unavailable", "storage_unavailable"),
        parameters=(LEASE_ID,),
        body=NarrowBody,
        response=LeaseAnswer,
    ),
)
async def narrow(request: Request) -> Response:
    """End the processes of the slot and take its network, its cache or the right to change entries of its workspace away, for the rest of the lease."""
    service = service_of(request)
    body = parse_body(NarrowBody, await read_object(request, service.limits))
    if body.allow_network is None and body.cache is None and body.read_only is None:
        raise InvalidRequest("allow_network: name what to take away: allow_network, cache, read_only, or several of them", field="allow_network")
    service.check_not_stopping()
    lease_id, read_only = request.path_params["lease_id"], body.read_only or ()
    lease = await service.pools.narrow(tenant_of(request).name, lease_id, allow_network=body.allow_network, cache=body.cache, read_only=read_only)
    return json_response(lease_document(lease))

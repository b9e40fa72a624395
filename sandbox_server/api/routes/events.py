"""The route that streams changes of pools, leases and sandboxes as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import LAST_EVENT_ID, TEXT, WITH_TOKEN, RawRoute, describe_route
from sandbox_server.api.contract.parse import last_event_id, query
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.streams import EVENT_STREAM_TYPE, MISSED_EVENT, EventStreamResponse, event_block
from sandbox_server.api.tenants import Tenant
from sandbox_server.pool.events import Event

router = APIRouter(route_class=RawRoute, tags=["service"])


@router.get(
    "/v1/events",
    **describe_route(
        "Everything that changes, as events",
        codes=(*WITH_TOKEN, "invalid_request", "quota_exceeded", "draining"),
        parameters=(LAST_EVENT_ID,),
        content={EVENT_STREAM_TYPE: {"schema": TEXT}},
    ),
)
async def events(request: Request) -> Response:
    """The changes from now on, or after `Last-Event-ID`. Tenants see the pools that they may use and their own leases; admins see all pools, and sandboxes."""
    service = service_of(request)
    query(request, ())
    after = last_event_id(request)
    service.check_not_stopping()
    tenant = tenant_of(request)
    reservation = await service.dispatcher.response_budget.reserve_stream(tenant.name)
    return EventStreamResponse(_event_blocks(service.events.follow(after), tenant), service, tenant.name, ends_with_service=True, on_end=reservation.release)


async def _event_blocks(events: AsyncIterator[Event | None], tenant: Tenant) -> AsyncGenerator[bytes, None]:
    async for event in events:
        if event is None:
            yield event_block({"detail": "events were missed: read the lists again"}, event=MISSED_EVENT)
        elif may_see(tenant, event):
            yield event_block({"at": event.at, "kind": event.kind, **event.data}, event=event.kind, event_id=event.id)


def may_see(tenant: Tenant, event: Event) -> bool:
    """Whether a tenant may see an event: its own leases and pools, shared pools, and for admins sandboxes and the pools of all tenants."""
    if tenant.admin and event.admins_too:
        return True
    return event.tenant in (None, tenant.name) and (tenant.admin or not event.admin_only)

"""Everything that changes, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import LAST_EVENT_ID, TEXT, WITH_TOKEN, RawRoute, described
from sandbox_server.api.contract.parse import last_event_id, query
from sandbox_server.api.service import service_of, tenant_of
from sandbox_server.api.streams import EVENT_STREAM_TYPE, EventStream, event_block
from sandbox_server.api.tenants import Tenant
from sandbox_server.pool.events import Event

router = APIRouter(route_class=RawRoute, tags=["service"])

MISSED = "missed"


@router.get(
    "/v1/events",
    **described(
        "Everything that changes, as events",
        codes=(*WITH_TOKEN, "invalid_request", "quota_exceeded", "draining"),
        parameters=(LAST_EVENT_ID,),
        content={EVENT_STREAM_TYPE: {"schema": TEXT}},
    ),
)
async def events(request: Request) -> Response:
    """What changes from now on, or after `Last-Event-ID`: pools for whoever may use them and for admins, leases for their tenant, sandboxes for admins."""
    service = service_of(request)
    query(request, ())
    after = last_event_id(request)
    service.check_not_stopping()
    tenant = tenant_of(request)
    reservation = await service.dispatcher.answer_budget.reserve_stream(tenant.name)
    return EventStream(_blocks(service.events.follow(after), tenant), service, tenant.name, ends_at_once=True, ended=reservation.release)


async def _blocks(found: AsyncIterator[Event | None], tenant: Tenant) -> AsyncGenerator[bytes, None]:
    async for event in found:
        if event is None:
            yield event_block({"detail": "events were missed: look at the lists again"}, event=MISSED)
        elif may_see(tenant, event):
            yield event_block({"at": event.at, "kind": event.kind, **event.data}, event=event.kind, event_id=event.id)


def may_see(tenant: Tenant, event: Event) -> bool:
    """Whether an event is this tenant's business: other tenants' leases are nobody's, other tenants' pools the admins', as sandboxes are."""
    if tenant.admin and event.admins_too:
        return True
    return event.tenant in (None, tenant.name) and (tenant.admin or not event.admin_only)

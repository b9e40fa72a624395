"""Tool calls: exec-batch, single exec, cancel."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox_server.api.answers import ExecBatchAnswer, ResultAnswer
from sandbox_server.api.body import read_object
from sandbox_server.api.call_events import exec_events, one_result
from sandbox_server.api.describe import LAST_EVENT_ID, LEASE_ID, REF, TEXT, WITH_BODY, WITH_LEASE, WITH_TOKEN, RawRoute, described
from sandbox_server.api.parse import batch_items, checked, exec_call, last_event_id
from sandbox_server.api.render import dumps, json_response, result_document
from sandbox_server.api.schemas import CancelBody, ExecBatchBody, ExecBody
from sandbox_server.api.service import service_of, tenant_of
from sandbox_server.api.streams import EVENT_STREAM_TYPE, HEARTBEAT_S, EventStream, check_room
from sandbox_server.core.execution import Result
from sandbox_server.dispatch.batch import Batch

router = APIRouter(route_class=RawRoute, tags=["calls"])

NDJSON_TYPE = "application/x-ndjson"


class ResultLines(Response):
    """Results as lines, each as soon as it is there, and an empty line now and then while none is.

    Args:
        batch: where they come from.
        heartbeat_s: how long nothing is sent at most, in seconds.
    """

    media_type = NDJSON_TYPE

    def __init__(self, batch: Batch, heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._batch = batch
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while (fresh := await self._batch.next(self._heartbeat_s)) is not None:
            lines = b"".join(dumps(result_document(result)) + b"\n" for _, result in fresh) or b"\n"
            await send({"type": "http.response.body", "body": lines, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.post(
    "/v1/exec-batch",
    **described(
        "Run tool calls over any number of leases",
        codes=(*WITH_TOKEN, *WITH_BODY, "quota_exceeded", "draining"),
        body=ExecBatchBody,
        answer=ExecBatchAnswer,
        content={NDJSON_TYPE: {"schema": {"$ref": REF.format(model=ResultAnswer.__name__)}}},
    ),
)
async def exec_batch(request: Request) -> Response:
    """Run a batch; a hang-up of the caller ends nothing."""
    service = service_of(request)
    items = batch_items(await read_object(request, service.limits), service.limits)
    service.check_not_stopping()
    batch = service.dispatcher.start(tenant_of(request).name, items)
    if NDJSON_TYPE in request.headers.get("accept", ""):
        return ResultLines(batch)
    return json_response({"results": [result_document(result) for result in await batch.all()]})


@router.post(
    "/v1/leases/{lease_id}/exec",
    **described(
        "Run one tool call",
        codes=(*WITH_TOKEN, *WITH_BODY, *WITH_LEASE, "quota_exceeded", "draining"),
        parameters=(LEASE_ID, LAST_EVENT_ID),
        body=ExecBody,
        answer=ResultAnswer,
        content={EVENT_STREAM_TYPE: {"schema": TEXT}},
    ),
)
async def exec_one(request: Request) -> Response:
    """Run one call under a lease that must hold."""
    service = service_of(request)
    wants_events = EVENT_STREAM_TYPE in request.headers.get("accept", "")
    call = exec_call(await read_object(request, service.limits), request.path_params["lease_id"], service.limits)
    service.check_not_stopping()
    tenant = tenant_of(request).name
    if isinstance(call, Result):
        service.pools.lease(tenant, call.lease_id)
        call = service.dispatcher.stamped(call)
        return EventStream(one_result(call), service) if wants_events else json_response(result_document(call))
    if wants_events:
        check_room(service)
        return EventStream(exec_events(service, tenant, call, last_event_id(request) or 0), service)
    return json_response(result_document(await service.dispatcher.run_one(tenant, call)))


@router.post(
    "/v1/cancel",
    **described(
        "End a running call",
        codes=(*WITH_TOKEN, *WITH_BODY, *WITH_LEASE, "call_not_found", "not_implemented", "backend_unavailable"),
        body=CancelBody,
        answer=ResultAnswer,
    ),
)
async def cancel(request: Request) -> Response:
    """Cancel a call and answer with its result."""
    service = service_of(request)
    body = checked(CancelBody, await read_object(request, service.limits))
    return json_response(result_document(await service.dispatcher.cancel(tenant_of(request).name, body.lease_id, body.call_id)))

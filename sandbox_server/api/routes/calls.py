"""Tool calls: exec-batch, single exec, cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox_server.api.answers import ExecBatchAnswer, ResultAnswer
from sandbox_server.api.body import CallerGone, read_object
from sandbox_server.api.call_events import exec_events, one_result
from sandbox_server.api.describe import LAST_EVENT_ID, LEASE_ID, REF, TEXT, WITH_BODY, WITH_LEASE, WITH_TOKEN, RawRoute, described
from sandbox_server.api.parse import batch_items, checked, exec_call, last_event_id
from sandbox_server.api.render import json_response, result_document
from sandbox_server.api.result_pieces import result_pieces, result_response, results_response
from sandbox_server.api.schemas import CancelBody, ExecBatchBody, ExecBody
from sandbox_server.api.service import service_of, tenant_of
from sandbox_server.api.streams import EVENT_STREAM_TYPE, HEARTBEAT_S, PART_BYTES, EventStream, body_part, check_room, hang_up, send_part
from sandbox_server.core.execution import Result
from sandbox_server.dispatch.batch import Batch

router = APIRouter(route_class=RawRoute, tags=["calls"])

NDJSON_TYPE = "application/x-ndjson"


class ResultLines(Response):
    """Results as lines, each as soon as it is there, and an empty line now and then while none is.

    Args:
        batch: where they come from; closed at the end, whatever that is.
        stall_s: how long the caller may take for one part, in seconds.
        heartbeat_s: how long nothing is sent at most, in seconds.
    """

    media_type = NDJSON_TYPE

    def __init__(self, batch: Batch, stall_s: float, heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._batch = batch
        self._stall_s = stall_s
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(hang_up(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (fresh := await self._batch.next(self._heartbeat_s)) is not None:
                async with aclosing(self._lines(deque(result for _, result in fresh))) as parts:
                    async for part in parts:
                        if gone.done():
                            raise CallerGone
                        await send_part(send, part, self._stall_s)
            await send(body_part(b"", more=False))
        finally:
            gone.cancel()
            self._batch.close()

    async def _lines(self, fresh: deque[Result]) -> AsyncGenerator[bytes, None]:
        """The lines of some results, in parts; an empty one of none."""
        waiting = b"" if fresh else b"\n"
        while fresh:
            result = fresh.popleft()
            async for piece in result_pieces(result):
                if len(waiting) >= PART_BYTES:
                    yield waiting
                    waiting = b""
                waiting += piece
            waiting += b"\n"
            self._batch.reservation.sent(result)
        yield waiting


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
    batch = await service.dispatcher.begin(tenant_of(request).name, items)
    if NDJSON_TYPE in request.headers.get("accept", ""):
        return ResultLines(batch, service.limits.answer_stall_s)
    try:
        return results_response(await batch.all(), service.limits.answer_stall_s, batch.close)
    except BaseException:
        batch.close()
        raise


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
        events, ended = await exec_events(service, tenant, call, last_event_id(request) or 0)
        return EventStream(events, service, ended=ended)
    reservation = await service.dispatcher.answers.reserve(tenant, [call])
    try:
        return result_response(await service.dispatcher.run_one(tenant, call, reservation), service.limits.answer_stall_s, reservation.release)
    except BaseException:
        reservation.release()
        raise


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
    result = await service.dispatcher.cancel(tenant_of(request).name, body.lease_id, body.call_id)
    return result_response(result, service.limits.answer_stall_s)

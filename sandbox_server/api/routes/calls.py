"""Tool calls: exec-batch, single exec, cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox_server.api.body import CallerGone, read_held_object, read_object
from sandbox_server.api.call_events import exec_events, one_result
from sandbox_server.api.contract.describe import LAST_EVENT_ID, LEASE_ID, REF, TEXT, WITH_BODY, WITH_LEASE, WITH_TOKEN, RawRoute, described
from sandbox_server.api.contract.parse import batch_items, checked, exec_call, last_event_id
from sandbox_server.api.contract.render import json_response, result_document
from sandbox_server.api.contract.requests import CancelBody, ExecBatchBody, ExecBody
from sandbox_server.api.contract.responses import ExecBatchAnswer, ResultAnswer
from sandbox_server.api.result_pieces import result_pieces, result_response, results_response, whole_response
from sandbox_server.api.service import service_of, tenant_of
from sandbox_server.api.streams import EVENT_STREAM_TYPE, HEARTBEAT_S, PART_BYTES, EventStream, body_part, check_room, hang_up, send_part
from sandbox_server.core.execution import Result, ToolCall
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
            while (fresh := await self._batch.next_results(self._heartbeat_s)) is not None:
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
            self._batch.reservation.release_sent_result(result)
        yield waiting


@router.post(
    "/v1/exec-batch",
    **described(
        "Run tool calls over any number of leases",
        codes=(*WITH_TOKEN, *WITH_BODY, "draining"),
        body=ExecBatchBody,
        answer=ExecBatchAnswer,
        content={NDJSON_TYPE: {"schema": {"$ref": REF.format(model=ResultAnswer.__name__)}}},
    ),
)
async def exec_batch(request: Request) -> Response:
    """Run a batch; a hang-up of the caller ends nothing."""
    service = service_of(request)
    document, room = await read_held_object(request, service.limits, with_lone_surrogates=True)
    try:
        items = batch_items(document, service.limits)
        service.check_not_stopping()
        batch = await service.dispatcher.start_when_there_is_room(tenant_of(request).name, items, ended=room.release)
    except BaseException:
        room.release()
        raise
    del document, items  # as each call gets its result, it is let go of
    if NDJSON_TYPE in request.headers.get("accept", ""):
        return ResultLines(batch, service.limits.answer_stall_s)
    try:
        return results_response(await batch.all_results(), service.limits.answer_stall_s, batch.close)
    except BaseException:
        batch.close()
        raise


@router.post(
    "/v1/leases/{lease_id}/exec",
    **described(
        "Run one tool call",
        codes=(*WITH_TOKEN, *WITH_BODY, *WITH_LEASE, "draining"),
        parameters=(LEASE_ID, LAST_EVENT_ID),
        body=ExecBody,
        answer=ResultAnswer,
        content={EVENT_STREAM_TYPE: {"schema": TEXT}},
    ),
)
async def exec_one(request: Request) -> Response:
    """Run one call under a lease that must hold."""
    service = service_of(request)
    document, room = await read_held_object(request, service.limits, with_lone_surrogates=True)
    try:
        service.check_not_stopping()
        return await _exec(request, exec_call(document, request.path_params["lease_id"], service.limits), room.release)
    except BaseException as error:
        # A call that has begun goes on without its caller, and its arguments stay as long.
        if not isinstance(error, asyncio.CancelledError):
            room.release()
        raise


async def _exec(request: Request, call: ToolCall | Result, ended: Callable[[], None]) -> Response:
    """Run a call; `ended` is to be called once it has its result."""
    service, tenant = service_of(request), tenant_of(request).name
    wants_events = EVENT_STREAM_TYPE in request.headers.get("accept", "")
    if isinstance(call, Result):
        ended()
        service.pools.lease(tenant, call.lease_id)
        call = service.dispatcher.with_refusal_time(call)
        return EventStream(one_result(call), service, tenant) if wants_events else json_response(result_document(call))
    if wants_events:
        check_room(service, tenant)
        events, closed = await exec_events(service, tenant, call, last_event_id(request) or 0, ended)
        return EventStream(events, service, tenant, ended=closed)
    reservation = await service.dispatcher.answer_budget.reserve(tenant, [call])
    try:
        return result_response(await service.dispatcher.run_call(tenant, call, reservation, ended), service.limits.answer_stall_s, reservation.release)
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
    tenant = tenant_of(request).name
    result = await service.dispatcher.cancel_call(tenant, body.lease_id, body.call_id)
    whole = whole_response(result, result_document)
    if whole is not None:
        return whole
    reservation = await service.dispatcher.answer_budget.reserve_stream(tenant, service.records.output_file_bytes(body.lease_id, body.call_id, result))
    return result_response(result, service.limits.answer_stall_s, reservation.release)

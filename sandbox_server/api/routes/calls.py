"""The routes that run and cancel tool calls: exec-batch, single exec, cancel."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox_server.api.body import ClientDisconnected, read_object, read_reserved_object
from sandbox_server.api.call_events import result_event, run_call_as_events
from sandbox_server.api.contract.describe import LAST_EVENT_ID, LEASE_ID, REF, TEXT, WITH_BODY, WITH_LEASE, WITH_TOKEN, RawRoute, describe_route
from sandbox_server.api.contract.parse import batch_items, exec_call, last_event_id, parse_body
from sandbox_server.api.contract.render import json_response, result_document
from sandbox_server.api.contract.requests import CancelBody, ExecBatchBody, ExecBody
from sandbox_server.api.contract.responses import ExecBatchAnswer, ResultAnswer
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.result_pieces import result_pieces, result_response, results_response, whole_response
from sandbox_server.api.streams import (
    EVENT_STREAM_TYPE,
    HEARTBEAT_S,
    PART_BYTES,
    EventStreamResponse,
    body_part,
    check_stream_limit,
    send_part,
    wait_for_disconnect,
)
from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.execution import Result, ToolCall
from sandbox_server.dispatch.batch import Batch

router = APIRouter(route_class=RawRoute, tags=["calls"])

NDJSON_TYPE = "application/x-ndjson"


class ResultLines(Response):
    """Results as lines of JSON, each sent as soon as there is one, with an empty line as a heartbeat while there is none.

    Args:
        batch: the batch whose results are sent. It is closed at the end, however the response ended.
        stall_s: for how long the client may read nothing, in seconds.
        heartbeat_s: for how long nothing is sent at most, in seconds.
    """

    media_type = NDJSON_TYPE

    def __init__(self, batch: Batch, stall_s: float, heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._batch = batch
        self._stall_s = stall_s
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        disconnected = asyncio.create_task(wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while (finished := await self._batch.next_results(self._heartbeat_s)) is not None:
                async with aclosing(self._lines(deque(result for _, result in finished))) as parts:
                    async for part in parts:
                        if disconnected.done():
                            raise ClientDisconnected
                        await send_part(send, part, self._stall_s)
            await send(body_part(b"", more=False))
        finally:
            disconnected.cancel()
            self._batch.discard_results()

    async def _lines(self, results: deque[Result]) -> AsyncGenerator[bytes, None]:
        """The lines of some results, in parts; for no results, an empty line. Takes each result out of the queue, so that its memory is freed."""
        part = b"" if results else b"\n"
        while results:
            result = results.popleft()
            async for piece in result_pieces(result):
                if len(part) >= PART_BYTES:
                    yield part
                    part = b""
                part += piece
            part += b"\n"
            self._batch.reservation.release_sent_result(result)
        yield part


@router.post(
    "/v1/exec-batch",
    **describe_route(
        "Run tool calls over any number of leases",
        codes=(*WITH_TOKEN, *WITH_BODY, "draining"),
        body=ExecBatchBody,
        response=ExecBatchAnswer,
        content={NDJSON_TYPE: {"schema": {"$ref": REF.format(model=ResultAnswer.__name__)}}},
    ),
)
async def exec_batch(request: Request) -> Response:
    """Run tool calls and return their results. The calls run to their ends even if the client closes the connection."""
    service = service_of(request)
    document, body_reservation = await read_reserved_object(request, service.limits, with_lone_surrogates=True)
    with cleanup_on_failure(body_reservation.release):
        items = batch_items(document, service.limits)
        service.check_not_stopping()
        batch = await service.dispatcher.reserve_and_start_calls(tenant_of(request).name, items, ended=body_reservation.release)
    del document, items  # so that the memory of each call is freed when it has its result
    if NDJSON_TYPE in request.headers.get("accept", ""):
        return ResultLines(batch, service.limits.answer_stall_s)
    with cleanup_on_failure(batch.discard_results):
        return results_response(await batch.all_results(), service.limits.answer_stall_s, batch.discard_results)


@router.post(
    "/v1/leases/{lease_id}/exec",
    **describe_route(
        "Run one tool call",
        codes=(*WITH_TOKEN, *WITH_BODY, *WITH_LEASE, "draining"),
        parameters=(LEASE_ID, LAST_EVENT_ID),
        body=ExecBody,
        response=ResultAnswer,
        content={EVENT_STREAM_TYPE: {"schema": TEXT}},
    ),
)
async def exec_one(request: Request) -> Response:
    """Run one tool call in the slot of a lease, and return its result."""
    service = service_of(request)
    document, body_reservation = await read_reserved_object(request, service.limits, with_lone_surrogates=True)
    try:
        service.check_not_stopping()
        return await _exec(request, exec_call(document, request.path_params["lease_id"], service.limits), body_reservation.release)
    except Exception:
        # Not if the request is cancelled: a call that has started runs on with its arguments in memory, and `_exec` releases them when it has its result.
        body_reservation.release()
        raise


async def _exec(request: Request, call: ToolCall | Result, on_result: Callable[[], None]) -> Response:
    """Run a call, or respond with the result that it has without running. `on_result` is called once it has its result."""
    service, tenant = service_of(request), tenant_of(request).name
    wants_events = EVENT_STREAM_TYPE in request.headers.get("accept", "")
    if isinstance(call, Result):
        on_result()
        service.pools.lease(tenant, call.lease_id)
        call = service.dispatcher.with_refusal_time(call)
        return EventStreamResponse(result_event(call), service, tenant) if wants_events else json_response(result_document(call))
    if wants_events:
        check_stream_limit(service, tenant)
        events, closed = await run_call_as_events(service, tenant, call, last_event_id(request) or 0, on_result)
        return EventStreamResponse(events, service, tenant, on_end=closed)
    reservation = await service.dispatcher.response_budget.reserve(tenant, [call])
    with cleanup_on_failure(reservation.release):
        return result_response(await service.dispatcher.run_call(tenant, call, reservation, on_result), service.limits.answer_stall_s, reservation.release)


@router.post(
    "/v1/cancel",
    **describe_route(
        "End a running call",
        codes=(*WITH_TOKEN, *WITH_BODY, *WITH_LEASE, "call_not_found", "not_implemented", "backend_unavailable"),
        body=CancelBody,
        response=ResultAnswer,
    ),
)
async def cancel(request: Request) -> Response:
    """Cancel a running call and return its result."""
    service = service_of(request)
    body = parse_body(CancelBody, await read_object(request, service.limits))
    tenant = tenant_of(request).name
    result = await service.dispatcher.cancel_call(tenant, body.lease_id, body.call_id)
    whole = whole_response(result, result_document)
    if whole is not None:
        return whole
    reservation = await service.dispatcher.response_budget.reserve_stream(tenant, service.call_queries.output_file_bytes(body.lease_id, body.call_id, result))
    return result_response(result, service.limits.answer_stall_s, reservation.release)

"""The route that runs many programs, each in a fresh slot of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sandbox_server.api.body import ClientDisconnected
from sandbox_server.api.contract.describe import REF, WITH_BODY, WITH_TOKEN, RawRoute, describe_route, json_content
from sandbox_server.api.contract.render import JSON_TYPE
from sandbox_server.api.contract.requests import RunBatchBody
from sandbox_server.api.contract.responses import ItemAnswer, RunBatchAnswer
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.run_batch.request_body import NDJSON_TYPE, read_run_batch
from sandbox_server.api.streams import HEARTBEAT_S, PART_BYTES, body_part, send_part, wait_for_disconnect
from sandbox_server.dispatch.run_batch.batch import RunBatch
from sandbox_server.dispatch.run_batch.result_log import Follower, Line

router = APIRouter(route_class=RawRoute, tags=["calls"])

RUN_BATCH_CODES = (
    *WITH_TOKEN,
    *WITH_BODY,
    "pool_not_found",
    "call_conflict",
    "lease_lost",
    "not_implemented",
    "draining",
    "backend_unavailable",
    "storage_unavailable",
)


class RunBatchResponse(Response):
    """The results of a run-batch. If nothing has run and nothing can, the error is raised, so that the response is a problem document.

    Args:
        batch: the run-batch.
        follower: reads its results.
        resources: is closed at the end, however the response ended.
        media_type: NDJSON for one line a result, as the items finish, or JSON for one object, when all have finished.
        stall_s: for how long the client may read nothing, in seconds.
        heartbeat_s: for how long no line is sent at most, in seconds.
    """

    def __init__(self, batch: RunBatch, follower: Follower, resources: ExitStack, media_type: str, stall_s: float, heartbeat_s: float = HEARTBEAT_S) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self._batch = batch
        self._follower = follower
        self._resources = resources
        self._stall_s = stall_s
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources:
            disconnected = asyncio.create_task(wait_for_disconnect(receive))
            try:
                chunks = self._object(disconnected) if self.media_type == JSON_TYPE else self._lines(disconnected)
                async with aclosing(chunks):
                    part = b""
                    while not part and (first := await anext(chunks, None)) is not None:
                        part = first
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    async for chunk in chunks:
                        # An empty chunk says that no more follows at once.
                        if part and (not chunk or len(part) >= PART_BYTES):
                            await self._send(send, part, disconnected)
                            part = b""
                        part += chunk
                await self._send(send, part, disconnected)
                await send(body_part(b"", more=False))
            finally:
                disconnected.cancel()

    async def _send(self, send: Send, part: bytes, disconnected: asyncio.Task[None]) -> None:
        if disconnected.done():
            raise ClientDisconnected
        await send_part(send, part, self._stall_s)

    async def _lines(self, disconnected: asyncio.Task[None]) -> AsyncGenerator[bytes, None]:
        results, follower = self._batch.results, self._follower
        while not self._batch.has_begun and await self._wait(results.changed, disconnected):
            pass
        self._batch.begin_response()
        yield b"\n"  # so that the client has the head of the response: from now on, errors are results of items
        while follower.position < self._batch.item_count:
            changed = results.changed
            if follower.position < len(results.lines):
                async with aclosing(results.read(results.lines[follower.position])) as pieces:
                    async for piece in pieces:
                        yield piece
                yield b"\n"
                results.advance(follower)
                continue
            yield b""
            if not await self._wait(changed, disconnected):
                yield b"\n"

    async def _object(self, disconnected: asyncio.Task[None]) -> AsyncGenerator[bytes, None]:
        results = self._batch.results
        while not self._batch.is_complete:
            await self._wait(results.changed, disconnected)
        in_order: list[Line] = sorted(results.lines, key=lambda line: line.index)
        yield b'{"results":['
        for number, line in enumerate(in_order):
            if number:
                yield b","
            async with aclosing(results.read(line)) as pieces:
                async for piece in pieces:
                    yield piece
        yield b"]}"

    async def _wait(self, changed: asyncio.Event, disconnected: asyncio.Task[None]) -> bool:
        """Wait until something has changed. Returns whether it has, or whether the time for a heartbeat has come.

        Raises:
            PoolServiceError: nothing has run, and nothing can.
            ClientDisconnected: the client closed the connection.
        """
        if self._batch.error is not None:
            raise self._batch.error
        waiting = asyncio.create_task(changed.wait())
        try:
            await asyncio.wait((waiting, disconnected), timeout=self._heartbeat_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if disconnected.done():
            raise ClientDisconnected
        return changed.is_set()


@router.post(
    "/v1/run-batch",
    **describe_route(
        "Run many programs, each in a fresh slot of its own",
        codes=RUN_BATCH_CODES,
        response=RunBatchAnswer,
        body_content={**json_content(RunBatchBody), NDJSON_TYPE: {"schema": {"type": "string"}}},
        content={NDJSON_TYPE: {"schema": {"$ref": REF.format(model=ItemAnswer.__name__)}}},
    ),
)
async def run_batch(request: Request) -> Response:
    """Run programs and return their results. If the client closes the connection, no further program begins."""
    service, tenant = service_of(request), tenant_of(request).name
    media_type = NDJSON_TYPE if NDJSON_TYPE in request.headers.get("accept", "") else JSON_TYPE
    reads_at_end = media_type == JSON_TYPE
    service.check_not_stopping()
    service.check_storage()
    with ExitStack() as resources:
        resources.enter_context(service.run_batches.admit(tenant))
        given = await read_run_batch(request, reads_at_end=reads_at_end)
        service.check_not_stopping()
        batch, follower = await service.run_batches.follow(given.request, given.spool, given.view, reads_at_end=reads_at_end)
        resources.callback(batch.detach, follower)
        return RunBatchResponse(batch, follower, resources.pop_all(), media_type, service.limits.answer_stall_s)

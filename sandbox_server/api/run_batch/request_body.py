"""Reads the body of a run-batch, as one JSON object or as NDJSON, and checks every item before anything runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from sandbox_server.api.body import check_length, parse_json, read_reserved_object, receive_part
from sandbox_server.api.contract.parse import parse_body
from sandbox_server.api.contract.programs import item_error, parse_program, run_batch_request
from sandbox_server.api.contract.requests import RunBatchHeader
from sandbox_server.api.limits import Limits, limit_sentence, too_large, too_many
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.core.cleanup import cleanup_on_failure
from sandbox_server.core.errors import InvalidRequest, NotImplementedHere
from sandbox_server.core.types import PoolView
from sandbox_server.dispatch.run_batch.program_spool import ProgramSpool
from sandbox_server.dispatch.run_batch.registry import RunBatches
from sandbox_server.dispatch.run_batch.values import MAX_JSON_ITEMS, Program, RunBatchRequest

NDJSON_TYPE = "application/x-ndjson"
ITEMS_PER_TURN = 32
"""After so many items, other requests run for a moment."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBatchInput:
    """A run-batch that has been read and checked: its fields, its programs, and its pool."""

    request: RunBatchRequest
    spool: ProgramSpool
    view: PoolView


@dataclass(slots=True)
class ItemChecks:
    """Checks the items of one request against each other and against its pool.

    Args:
        request: the request.
        view: its pool.
        run_batches: knows which rights the slots of the pool can have.
        limits: the limits of the service.
        reads_at_end: whether the answer is one JSON object, for which the outputs of all items are kept.
    """

    request: RunBatchRequest
    view: PoolView
    run_batches: RunBatches
    limits: Limits
    reads_at_end: bool
    _output_bytes: int = 0
    _rights_checked: set[bool | None] = field(default_factory=set)

    def check(self, program: Program, index: int) -> None:
        """Check one item.

        Raises:
            InvalidRequest: there are too many items, they may write too much, or an item asks for rights that the pool does not give.
            NotImplementedHere: the pool cannot take the rights away that the item is not to have.
        """
        if index >= self.limits.run_batch_items:
            raise too_many(self.limits, "run_batch_items", "items")
        self._output_bytes += program.output_limit_bytes
        if self.reads_at_end and self._output_bytes > self.limits.batch_output_bytes:
            problem = f"{limit_sentence(self.limits, 'batch_output_bytes')}; ask for the results as NDJSON, or for less output"
            raise item_error(index, "output_limit_bytes", problem, limit="batch_output_bytes")
        if program.allow_network not in self._rights_checked:
            self._check_rights(program.allow_network, index)
            self._rights_checked.add(program.allow_network)

    def _check_rights(self, allow_network: bool | None, index: int) -> None:
        try:
            self.run_batches.check_rights(self.request, self.view, allow_network)
        except InvalidRequest as error:
            raise item_error(index, "allow_network", error.detail) from None
        except NotImplementedHere as error:
            raise NotImplementedHere(error.detail, field=f"items.{index}.allow_network", index=index) from None


async def read_run_batch(request: Request, *, reads_at_end: bool) -> RunBatchInput:
    """Read and check the body of a run-batch. The programs are in a file and not in memory when this returns.

    Args:
        request: the request.
        reads_at_end: whether the answer is one JSON object.

    Raises:
        Exception: those of `read_json`; InvalidRequest with the `index` of the item that is wrong; PoolNotFound; StorageUnavailable.
    """
    is_ndjson = request.headers.get("content-type", "").partition(";")[0].strip().lower() == NDJSON_TYPE
    return await (_read_ndjson(request, reads_at_end) if is_ndjson else _read_object(request, reads_at_end))


async def _read_object(request: Request, reads_at_end: bool) -> RunBatchInput:
    limits = service_of(request).limits
    document, reservation = await read_reserved_object(request, limits, with_lone_surrogates=True)
    try:
        items = document.pop("items", None)
        if not isinstance(items, list) or not items:
            raise InvalidRequest("items: must be a list of at least one item", field="items")
        if len(items) > MAX_JSON_ITEMS:
            raise InvalidRequest(f"items: at most {MAX_JSON_ITEMS} in one JSON object: send more as NDJSON", field="items")
        return await _check_items(request, document, _values(items), reads_at_end)
    finally:
        reservation.release()


async def _values(items: list[Any]) -> AsyncGenerator[Any, None]:
    for item in items:
        yield item


async def _read_ndjson(request: Request, reads_at_end: bool) -> RunBatchInput:
    service = service_of(request)
    check_length(request, service.limits, "run_batch_bytes")
    length = request.headers.get("content-length", "")
    most_bytes = service.limits.body_bytes
    reservation = await service.body_budget.reserve(tenant_of(request).name, min(int(length), most_bytes) if length.isdecimal() else most_bytes)
    try:
        async with aclosing(_lines(request, service.limits)) as lines:
            header = await anext(lines, None)
            if header is None:
                raise InvalidRequest("the body is empty: send a line with the fields of the run-batch, then one line for each item", field="body")
            document = parse_json(header, service.limits)
            if not isinstance(document, dict):
                raise InvalidRequest("body: the first line is not a JSON object", field="body")
            return await _check_items(request, document, _parsed_lines(lines, service.limits), reads_at_end)
    finally:
        reservation.release()


async def _lines(request: Request, limits: Limits) -> AsyncGenerator[bytes, None]:
    """The lines of a body that are not empty, as they arrive.

    Raises:
        PayloadTooLarge: the body or a line is too long.
        InvalidRequest, ClientDisconnected: as `read_json`.
    """
    line, received_bytes, more = bytearray(), 0, True
    while more:
        chunk, more = await receive_part(request, limits.body_stall_s)
        received_bytes += len(chunk)
        if received_bytes > limits.run_batch_bytes:
            raise too_large(limits, "run_batch_bytes")
        *complete, rest = chunk.split(b"\n")
        for end in complete:
            line += end
            if line.strip():
                yield bytes(line)
            line.clear()
        line += rest
        if len(line) > limits.body_bytes:
            raise too_large(limits, "body_bytes")
    if line.strip():
        yield bytes(line)


async def _parsed_lines(lines: AsyncIterator[bytes], limits: Limits) -> AsyncGenerator[Any, None]:
    index = 0
    async for line in lines:
        try:
            value = parse_json(line, limits, with_lone_surrogates=True)
        except InvalidRequest as error:
            raise item_error(index, "", error.detail) from None
        yield value
        index += 1


async def _check_items(request: Request, header: dict[str, Any], items: AsyncGenerator[Any, None], reads_at_end: bool) -> RunBatchInput:
    """Check a request and write its programs into a file."""
    service = service_of(request)
    wanted = run_batch_request(parse_body(RunBatchHeader, header), tenant_of(request).name, service.default_pool)
    view = service.run_batches.view_pool(wanted)
    checks = ItemChecks(wanted, view, service.run_batches, service.limits, reads_at_end)
    spool = service.run_batches.new_spool(wanted)
    with cleanup_on_failure(spool.close):
        async with aclosing(items):
            async for item in items:
                index = len(spool)
                program = parse_program(item, index, service.limits, view.spec.max_timeout_s)
                checks.check(program, index)
                await spool.append(program)
                if index % ITEMS_PER_TURN == 0:
                    await asyncio.sleep(0)
        if not len(spool):
            raise InvalidRequest("items: there is none: send one line for each item behind the first line", field="items")
        await spool.finish()
    return RunBatchInput(request=wanted, spool=spool, view=view)

"""The routes from which other programs read the service: metrics for Prometheus, and the agent."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Iterator, Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.agent.build import content
from sandbox_server.api.contract.describe import ALWAYS, BINARY, TEXT, WITH_TOKEN, RawRoute, describe_route
from sandbox_server.api.request_context import PoolOperations, service_of
from sandbox_server.api.streams import PART_BYTES, StreamResponse
from sandbox_server.core.types import PoolId
from sandbox_server.pool.access import ALL_TENANTS, SERVICE
from sandbox_server.telemetry import METRICS_CONTENT_TYPE

router = APIRouter(route_class=RawRoute, tags=["service"])

ZIP_TYPE = "application/zip"
TEXT_TYPE = "text/plain"


def pool_gauges(pools: PoolOperations) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """The current values of the gauges of every pool: metric name, labels, value."""
    for view in pools.views(actor=SERVICE, tenant=ALL_TENANTS):
        labels = PoolId(view.name, view.tenant).labels
        for state, count in view.slots.items():
            yield "sandbox_slots", {**labels, "state": state}, count
        for state, count in view.sandboxes.items():
            yield "sandbox_sandboxes", {**labels, "state": state}, count
        yield "sandbox_acquire_queue", labels, view.queue
        yield "sandbox_held_slots", labels, 0 if view.claimant is None else view.claimant.held_slots


@router.get("/metrics", **describe_route("Metrics for Prometheus", codes=WITH_TOKEN, content={TEXT_TYPE: {"schema": TEXT}}))
async def metrics(request: Request) -> Response:
    """Every metric, in the text format of Prometheus."""
    service = service_of(request)
    return Response(service.telemetry.text(pool_gauges(service.pools)), headers={"content-type": METRICS_CONTENT_TYPE})


@functools.cache
def agent_zipapp() -> tuple[bytes, str]:
    """The agent's zipapp, and an entity tag that changes with its content."""
    data = content()
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'


@router.get("/v1/agent.pyz", **describe_route("The agent", codes=ALWAYS, content={ZIP_TYPE: {"schema": BINARY}}))
async def agent_pyz(request: Request) -> Response:
    """The program that runs inside a sandbox, as one file for any Python from 3.8 on."""
    data, tag = agent_zipapp() if agent_zipapp.cache_info().currsize else await asyncio.to_thread(agent_zipapp)
    headers = {"etag": tag, "content-disposition": 'attachment; filename="agent.pyz"'}
    # Sent in pieces: this route needs no token, and whole responses that are requested and never read would fill the memory.
    response = StreamResponse(_pieces(data), ZIP_TYPE, headers, stall_s=service_of(request).limits.answer_stall_s)
    response.headers["content-length"] = str(len(data))
    return response


async def _pieces(data: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), PART_BYTES):
        yield data[start : start + PART_BYTES]

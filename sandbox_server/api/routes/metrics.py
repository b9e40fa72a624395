"""What others read of the service: figures for Prometheus, and the agent itself."""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import AsyncGenerator, Iterator, Mapping

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.agent.build import content
from sandbox_server.api.contract.describe import ALWAYS, BINARY, TEXT, WITH_TOKEN, RawRoute, described
from sandbox_server.api.service import PoolsSeam, service_of
from sandbox_server.api.streams import PART_BYTES, Stream
from sandbox_server.core.types import PoolId
from sandbox_server.pool.access import ALL_TENANTS, SERVICE
from sandbox_server.telemetry import FIGURES_TYPE

router = APIRouter(route_class=RawRoute, tags=["service"])

ZIP_TYPE = "application/zip"
TEXT_TYPE = "text/plain"


def standing(pools: PoolsSeam) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """What stands now, pool by pool: name, labels, value."""
    for view in pools.views(actor=SERVICE, tenant=ALL_TENANTS):
        labels = PoolId(view.name, view.tenant).labels
        for state, count in view.slots.items():
            yield "sandbox_slots", {**labels, "state": state}, count
        for state, count in view.sandboxes.items():
            yield "sandbox_sandboxes", {**labels, "state": state}, count
        yield "sandbox_acquire_queue", labels, view.queue
        yield "sandbox_held_slots", labels, 0 if view.claimant is None else view.claimant.held_slots


@router.get("/metrics", **described("Figures for Prometheus", codes=WITH_TOKEN, content={TEXT_TYPE: {"schema": TEXT}}))
async def metrics(request: Request) -> Response:
    """Every figure, in Prometheus' own text."""
    service = service_of(request)
    return Response(service.telemetry.text(standing(service.pools)), headers={"content-type": FIGURES_TYPE})


@functools.cache
def agent_zipapp() -> tuple[bytes, str]:
    """The agent's zipapp, and a tag that changes when it does."""
    data = content()
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'


@router.get("/v1/agent.pyz", **described("The agent", codes=ALWAYS, content={ZIP_TYPE: {"schema": BINARY}}))
async def agent_pyz(request: Request) -> Response:
    """The program that runs inside a sandbox, as one file for any Python from 3.8 on."""
    data, tag = agent_zipapp() if agent_zipapp.cache_info().currsize else await asyncio.to_thread(agent_zipapp)
    headers = {"etag": tag, "content-disposition": 'attachment; filename="agent.pyz"'}
    # In pieces: whole answers that nobody reads would fill the memory, and nobody needs a token to ask for this one.
    answer = Stream(_pieces(data), ZIP_TYPE, headers, stall_s=service_of(request).limits.answer_stall_s)
    answer.headers["content-length"] = str(len(data))
    return answer


async def _pieces(data: bytes) -> AsyncGenerator[bytes, None]:
    for start in range(0, len(data), PART_BYTES):
        yield data[start : start + PART_BYTES]

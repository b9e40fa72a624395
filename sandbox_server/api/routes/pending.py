"""Routes of the contract that are not built yet: they say so."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import ALWAYS, LEASE_ID, WITH_TOKEN, RawRoute, described
from sandbox_server.core.errors import NotImplementedHere

router = APIRouter(route_class=RawRoute, tags=["not built yet"])

PENDING = (
    ("GET", "/v1/leases/{lease_id}/terminal", "A terminal (WebSocket)", (LEASE_ID,)),
    ("GET", "/", "The page", ()),
)
OPEN = frozenset({"/"})


async def not_built(request: Request) -> Response:
    """Say that there is nothing here yet."""
    raise NotImplementedHere(f"{request.method} {request.scope['route'].path} is not built yet")


for _method, _path, _summary, _parameters in PENDING:
    _codes = (*(ALWAYS if _path in OPEN else WITH_TOKEN), "not_implemented")
    router.add_api_route(
        _path, not_built, methods=[_method], name=f"{_method} {_path}", **described(_summary, codes=_codes, status=501, parameters=_parameters)
    )

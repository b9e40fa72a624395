"""The routes of the contract that are not built yet. They respond with `not_implemented`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sandbox_server.api.contract.describe import ALWAYS, WITH_TOKEN, RawRoute, describe_route
from sandbox_server.core.errors import NotImplementedHere

router = APIRouter(route_class=RawRoute, tags=["not built yet"])

PENDING = (("GET", "/", "The page", ()),)
OPEN = frozenset({"/"})


async def refuse_request(request: Request) -> Response:
    """Refuse a request to a route that is not built yet.

    Raises:
        NotImplementedHere: always.
    """
    raise NotImplementedHere(f"{request.method} {request.scope['route'].path} is not built yet")


for _method, _path, _summary, _parameters in PENDING:
    _codes = (*(ALWAYS if _path in OPEN else WITH_TOKEN), "not_implemented")
    router.add_api_route(
        _path, refuse_request, methods=[_method], name=f"{_method} {_path}", **describe_route(_summary, codes=_codes, status=501, parameters=_parameters)
    )

"""The route to the programs that listen in a leased slot: HTTP with any method, and WebSocket."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.convertors import Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from sandbox_server.api.contract.describe import BINARY, LEASE_ID, WITH_LEASE, WITH_TOKEN, RawRoute, describe_route, parameter
from sandbox_server.api.contract.render import BYTES_TYPE
from sandbox_server.api.ports.http_exchange import PortResponse
from sandbox_server.api.ports.target import MAX_PORT, target_of
from sandbox_server.api.ports.websocket_relay import relay_websocket


class RestOfPath(Convertor[str]):
    """What is left of a path: slashes, and characters that end a line, which the convertor `path` of Starlette does not match."""

    regex = "(?s:.*)"

    def convert(self, value: str) -> str:
        return value

    def to_string(self, value: str) -> str:
        return value


register_url_convertor("rest", RestOfPath())
router = APIRouter(route_class=RawRoute, tags=["ports"])

ROOT_PATH = "/v1/leases/{lease_id}/ports/{port}"
PATH = ROOT_PATH + "/{path:rest}"
METHODS = ("DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT")
MORE_METHODS = ("COPY", "LOCK", "MKCALENDAR", "MKCOL", "MOVE", "PROPFIND", "PROPPATCH", "QUERY", "REPORT", "SEARCH", "UNLOCK")
"""Methods that OpenAPI has no word for. TRACE and CONNECT are about the way of a request, and are not passed on."""
CODES = (*WITH_TOKEN, *WITH_LEASE, "invalid_request", "payload_too_large", "quota_exceeded", "not_implemented", "port_closed", "backend_unavailable")
PORT = parameter("port", {"type": "integer", "minimum": 1, "maximum": MAX_PORT}, "a TCP port of the slot", location="path", required=True)
REST = parameter("path", {"type": "string"}, "the path that the program sees", location="path", required=True)


async def use_port(request: Request) -> Response:
    """Pass a request on to a program in the slot, and its answer back."""
    return PortResponse(target_of(request.scope))


async def use_port_by_websocket(websocket: WebSocket) -> None:
    """Connect a client with a program in the slot."""
    await relay_websocket(websocket, target_of(websocket.scope))


for _method in METHODS:
    router.add_api_route(
        PATH,
        use_port,
        methods=[_method],
        name=f"{_method} {PATH}",
        **describe_route(
            "Use a program that listens in the slot",
            codes=CODES,
            parameters=(LEASE_ID, PORT, REST),
            content={"*/*": {"schema": BINARY}},
            body_content={BYTES_TYPE: {"schema": BINARY}} if _method not in ("GET", "HEAD", "OPTIONS") else None,
        ),
    )
router.add_api_route(PATH, use_port, methods=list(MORE_METHODS), include_in_schema=False)
router.add_api_route(ROOT_PATH, use_port, methods=[*METHODS, *MORE_METHODS], include_in_schema=False)
router.add_websocket_route(PATH, use_port_by_websocket)
router.add_websocket_route(ROOT_PATH, use_port_by_websocket)

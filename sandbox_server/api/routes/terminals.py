"""The route of terminals: a WebSocket connection to an interactive shell in a leased slot."""

from __future__ import annotations

import re

from fastapi import APIRouter
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from sandbox_server.api.contract.describe import LEASE_ID, WITH_LEASE, WITH_TOKEN, RawRoute, describe_route, parameter
from sandbox_server.api.contract.parse import query
from sandbox_server.api.request_context import service_of, tenant_of
from sandbox_server.api.streams import check_open_at_once
from sandbox_server.api.terminal import TerminalConnection
from sandbox_server.core.errors import InvalidRequest
from sandbox_server.link.terminal_stream import MAX_SIDE, TerminalRequest

router = APIRouter(route_class=RawRoute, tags=["terminals"])

TERMINAL_PATH = "/v1/leases/{lease_id}/terminal"
DEFAULT_COLS, DEFAULT_ROWS = 80, 24
SESSION = re.compile(r"[A-Za-z0-9._:-]{1,64}")
MODES = ("write", "watch")
_SIDE = {"type": "integer", "minimum": 1, "maximum": MAX_SIDE}
PARAMETERS = (
    LEASE_ID,
    parameter("cols", {**_SIDE, "default": DEFAULT_COLS}, "the width of the window in columns"),
    parameter("rows", {**_SIDE, "default": DEFAULT_ROWS}, "the height of the window in rows"),
    parameter("session", {"type": "string", "pattern": f"^{SESSION.pattern}$"}, "the name of the terminal; without it a new one"),
    parameter("mode", {"type": "string", "enum": list(MODES), "default": "write"}, "whether to write, or only to watch"),
)
CODES = (*WITH_TOKEN, *WITH_LEASE, "invalid_request", "quota_exceeded", "not_implemented", "backend_unavailable", "draining")


@router.get(TERMINAL_PATH, **describe_route("A terminal (WebSocket)", codes=CODES, status=101, parameters=PARAMETERS))
async def refuse_without_websocket(request: Request) -> Response:
    """Refuse a request that does not ask for a WebSocket connection.

    Raises:
        InvalidRequest: always.
    """
    raise InvalidRequest("a terminal is a WebSocket connection: connect to this address with ws:// or wss://")


async def serve_terminal(websocket: WebSocket) -> None:
    """Connect a client with a terminal of its lease."""
    service, tenant = service_of(websocket), tenant_of(websocket).name
    request = terminal_request(websocket)
    service.check_not_stopping()
    check_open_at_once(service.limits, "terminals", service.terminal_counts, tenant)
    service.terminal_counts[tenant] += 1
    try:
        reservation = await service.dispatcher.response_budget.reserve_stream(tenant)
        try:
            async with service.terminals.open_terminal(tenant, websocket.path_params["lease_id"], request) as terminal:
                connection = TerminalConnection(
                    websocket.receive, websocket.send, terminal,
                    may_write=request.may_write, stopping=service.stopping, stall_s=service.limits.answer_stall_s,
                )  # fmt: skip
                await connection.serve()
        finally:
            reservation.release()
    finally:
        service.terminal_counts[tenant] -= 1


router.add_websocket_route(TERMINAL_PATH, serve_terminal)


def terminal_request(connection: HTTPConnection) -> TerminalRequest:
    """Read which terminal a handshake asks for.

    Raises:
        InvalidRequest: a parameter is unknown or not valid.
    """
    asked = query(connection, ("cols", "rows", "session", "mode"))
    session, mode = asked.get("session"), asked.get("mode", "write")
    if session is not None and not SESSION.fullmatch(session):
        raise InvalidRequest("session: must be 1 to 64 letters, digits or any of . _ : -", field="session")
    if mode not in MODES:
        raise InvalidRequest(f"mode: must be {' or '.join(MODES)}", field="mode")
    return TerminalRequest(session=session, cols=_side(asked, "cols", DEFAULT_COLS), rows=_side(asked, "rows", DEFAULT_ROWS), may_write=mode == "write")


def _side(asked: dict[str, str], name: str, default: int) -> int:
    text = asked.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= MAX_SIDE):
        raise InvalidRequest(f"{name}: must be a whole number from 1 to {MAX_SIDE}", field=name)
    return int(text)

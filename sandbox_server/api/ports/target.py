"""What a request to a port of a slot asks for: the lease, the port, and the path that the program is to see."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import quote, unquote

from starlette.types import Scope

from sandbox_server.core.errors import InvalidRequest

MAX_PORT = 65_535
_HEAD_SEGMENTS = 6
"""How many slashes precede the path that the program sees: those of `/v1/leases/ID/ports/PORT/`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PortTarget:
    """The target of one request.

    Args:
        lease_id: the lease that holds the slot.
        port: the TCP port in the slot.
        prefix: what precedes the program's own paths in the paths of the service, without a slash at its end.
        path: the path and query that the program sees, byte for byte as the client has sent them.
    """

    lease_id: str
    port: int
    prefix: bytes
    path: bytes


def target_of(scope: Scope) -> PortTarget:
    """Find out what a request to a port asks for.

    Args:
        scope: the scope of the request, or of the WebSocket handshake. Its route has found `lease_id` and `port`.

    Raises:
        InvalidRequest: the port is not one, or a slash in front of the port was sent encoded.
    """
    lease_id: str = scope["path_params"]["lease_id"]
    digits: str = scope["path_params"]["port"]
    port = int(digits) if len(digits) <= len(str(MAX_PORT)) and digits.isascii() and digits.isdecimal() else 0
    if not 1 <= port <= MAX_PORT or str(port) != digits:
        raise InvalidRequest(f"port: must be a number from 1 to {MAX_PORT}", field="port")
    # The decoded path does not say which slashes were encoded, and the program must see what the client has sent.
    raw: bytes = scope.get("raw_path") or quote(scope["path"]).encode()
    root = scope.get("root_path", "").encode()
    segments = raw.removeprefix(root).split(b"/", _HEAD_SEGMENTS)
    if len(segments) < _HEAD_SEGMENTS or unquote(segments[3]) != lease_id or segments[5] != digits.encode():
        raise InvalidRequest("path: no part of /v1/leases/ID/ports/PORT may have an encoded slash or digit", field="path")
    rest = segments[_HEAD_SEGMENTS] if len(segments) > _HEAD_SEGMENTS else b""
    query: bytes = scope.get("query_string", b"")
    return PortTarget(
        lease_id=lease_id,
        port=port,
        prefix=root + b"/".join(segments[:_HEAD_SEGMENTS]),
        path=b"/" + rest + (b"?" + query if query else b""),
    )

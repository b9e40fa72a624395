"""The address of a program that listens on a port of a slot. HTTP and WebSocket libraries use it; the client itself sends nothing there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from env_client.errors import InvalidRequest
from env_client.messages.message import quote_path_segment
from env_client.type_checks import check_type

MAX_PORT = 65_535


@dataclass(frozen=True, kw_only=True, slots=True)
class PortAddress:
    """Where a program that listens in a slot can be reached, for any HTTP or WebSocket library.

    `url` ends with a slash, so that a path of the program can be appended or joined. `headers` authenticate each request; the service removes them, so
    that the token does not reach the slot. They are left out of `repr`.
    """

    port: int
    url: str
    headers: Mapping[str, str] = field(repr=False)

    @property
    def ws_url(self) -> str:
        """The URL for WebSocket connections."""
        return "ws" + self.url.removeprefix("http")


def port_address(service_url: str, token: str | None, lease_id: str, port: int) -> PortAddress:
    """Return the address of a port of a slot.

    Args:
        service_url: the address of the service, without a slash at its end.
        token: the token; None if the service requires none.
        lease_id: the lease of the slot.
        port: the TCP port that the program listens on.

    Raises:
        InvalidRequest: the port is not one.
    """
    check_type("port", port, int)
    if isinstance(port, bool) or not 1 <= port <= MAX_PORT:
        raise InvalidRequest(f"port must be from 1 to {MAX_PORT}, not {port}")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return PortAddress(port=port, url=f"{service_url}/v1/leases/{quote_path_segment(lease_id)}/ports/{port}/", headers=headers)

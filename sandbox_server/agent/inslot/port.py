"""The operation `route_connect`: connects to a port of the slot's own network, and hands the connection to the agent.

The child ends as soon as the agent has the connection, so that nothing of the slot stands between the agent and the program that listens.
"""

from __future__ import annotations

import _socket as socket
import errno

from sandbox_server.agent.inslot.confine import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

CONNECT_WITHIN_S = 5.0
_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))


def route_connect(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Connect to the TCP port `args["port"]` of the loopback interface: to 127.0.0.1, and where nobody listens there, to ::1.

    Raises:
        Refusal: nobody listens, or nobody has accepted the connection in time.
    """
    port = args["port"]
    for family, address in _LOOPBACK:
        try:
            sock = _connect(family, address, port)
        except ConnectionRefusedError:
            continue
        except OSError as error:
            if family == socket.AF_INET6:
                break  # the slot has no IPv6, and nobody listens on 127.0.0.1
            raise _refusal(port, error) from None
        reply.send_ok_with_descriptor(sock.fileno())
        return
    raise Refusal("port_closed", f"nothing listens on port {port} of the slot", "ECONNREFUSED")


def _connect(family: int, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.settimeout(CONNECT_WITHIN_S)
    sock.connect((address, port))
    if sock.getsockname()[:2] == sock.getpeername()[:2]:
        # Where nobody listens, the kernel may have chosen this same port for this end: the connection then leads back to itself.
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, "nobody listens")
    return sock


def _refusal(port: int, error: OSError) -> Refusal:
    if error.errno is None or error.errno == errno.ETIMEDOUT:  # a timeout of Python has no error number
        return Refusal("port_closed", f"the program that listens on port {port} of the slot has not accepted a connection within {CONNECT_WITHIN_S:g} s")
    return Refusal("port_closed", f"port {port} of the slot cannot be connected to: {error.strerror}", errno.errorcode.get(error.errno))

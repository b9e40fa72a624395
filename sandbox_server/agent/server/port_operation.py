"""The operation `port`: a connection to a program that listens in a slot, whose bytes the stream carries in both directions."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Mapping

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.port_connector import connect_to_port
from sandbox_server.agent.inslot.arguments import check_args
from sandbox_server.agent.server.connections import Stream, StreamHandler
from sandbox_server.agent.slots.slots import AgentSlot
from sandbox_server.agent.wire import DATA_BYTES


class PortRelay:
    """One connection to a port of a slot.

    The first message to the service says that the connection stands. From then on, data goes both ways, and each direction ends by itself. Neither side
    sends more than the other takes: data of the service is acknowledged once the kernel has it, and the connection is read only while the stream has credit.

    Args:
        stream: the stream of the operation.
        slot: the slot.
        port: the TCP port.
    """

    def __init__(self, stream: Stream, slot: AgentSlot, port: int) -> None:
        self._stream = stream
        self._slot = slot
        self._port = port
        self._loop = asyncio.get_event_loop()
        self._incoming: asyncio.Queue[bytes | None] = asyncio.Queue()  # at most as much as the credit of the stream
        slot.port_connections.add(self)
        self._serving = self._loop.create_task(self._serve())

    # The messages of the service.

    def on_item(self, meta: dict[str, Any], body: bytes) -> None:
        """See `StreamHandler`. What the service sends to the program is data."""
        raise Refused("invalid", "a port stream takes no items")

    def on_data(self, body: bytes) -> None:
        """See `StreamHandler`. The data is for the program."""
        self._incoming.put_nowait(body)

    def on_end(self) -> None:
        """See `StreamHandler`. The program reads the end of its input after all data."""
        self._incoming.put_nowait(None)

    def on_abort(self) -> None:
        """See `StreamHandler`. The service needs the connection no more."""
        self._serving.cancel()

    def close_connection(self, detail: str) -> None:
        """End the connection because the slot's processes are ended.

        Args:
            detail: why, for the service.
        """
        self._stream.refuse(Refused("port_closed", "the connection to port %d was ended: %s" % (self._port, detail)))
        self._serving.cancel()

    # Both directions.

    async def _serve(self) -> None:
        try:
            sock = await connect_to_port(self._slot.current_runtime(), self._slot.tasks, self._port)
        except Refused as error:
            self._stream.refuse(error)
        except OSError as error:
            self._stream.refuse(Refused("internal", "the agent cannot connect to port %d: %s" % (self._port, error)))
        else:
            await self._relay(sock)
        finally:
            self._slot.port_connections.discard(self)

    async def _relay(self, sock: socket.socket) -> None:
        self._stream.send_item({"connected": True})
        feeding = self._loop.create_task(self._feed_program(sock))
        try:
            await self._forward_output(sock)
            await feeding
        except OSError as error:
            self._stream.refuse(Refused("port_closed", "the program on port %d of the slot has broken the connection: %s" % (self._port, error.strerror)))
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])  # only then is the event loop done with the descriptor
            sock.close()

    async def _feed_program(self, sock: socket.socket) -> None:
        """Pass the data of the service to the program, until the service has sent everything. A program that reads no more may still answer."""
        is_readable = True
        while True:
            data = await self._incoming.get()
            if data is None:
                break
            if is_readable:
                try:
                    await self._loop.sock_sendall(sock, data)
                except OSError:
                    is_readable = False
            self._stream.acknowledge(data)
        if is_readable:
            try:
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                return  # the program has ended the connection itself

    async def _forward_output(self, sock: socket.socket) -> None:
        while True:
            data = await self._loop.sock_recv(sock, DATA_BYTES)
            if not data:
                self._stream.end_stream()
                return
            if not await self._stream.send_data(data):
                raise asyncio.CancelledError


def open_port(stream: Stream, slot: AgentSlot, meta: Mapping[str, Any]) -> StreamHandler:
    """Begin to connect to a port of a slot.

    Args:
        stream: the stream of the operation.
        slot: the slot.
        meta: names the `port`.

    Raises:
        Refused: the port is not one, the slot shares the network of its sandbox, or has as many connections as it may have.
    """
    port = meta.get("port")
    problem = check_args("route_connect", {"port": port})
    if problem is not None:
        raise Refused("invalid", problem)
    if not slot.current_runtime().has_own_network_namespace:
        detail = (
            "this slot shares the network of its sandbox: ports can be used of slots with a network of their own, "
            "which are those of leases without network, and those of pools with network internet"
        )
        raise Refused("not_implemented", detail)
    if len(slot.port_connections) >= slot.max_port_connections:
        detail = "%d connections to ports of this slot are open, and there can be no more at once: close some" % len(slot.port_connections)
        raise Refused("limit_reached", detail)
    assert isinstance(port, int), "checked above"
    return PortRelay(stream, slot, port)

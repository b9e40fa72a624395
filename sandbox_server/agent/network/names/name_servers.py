"""Asks the name servers of the machine."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import secrets
import socket
import struct

from sandbox_server.agent.network.names.dns_messages import Answer, DnsError, Question, read_answer, write_query

_RESOLV_CONF = "/etc/resolv.conf"
_PORT, _MAX_SERVERS, _ROUNDS = 53, 3, 2
_ANSWER_WITHIN_S = 2.0


class NameServers:
    """The name servers that the machine uses, as its resolv.conf names them now.

    Args:
        path: the path of resolv.conf.
    """

    def __init__(self, path: str = _RESOLV_CONF) -> None:
        self._path = path
        self._read_when: tuple[int, int] | None = None
        self._servers: list[str] = []

    def list_servers(self) -> list[str]:
        """Return the addresses of the name servers, in the order in which they are asked."""
        try:
            info = os.stat(self._path)
            version = (info.st_ino, info.st_mtime_ns)
            if version != self._read_when:
                with open(self._path, encoding="utf-8", errors="replace") as file:
                    lines = [line.split() for line in file]
                named = [words[1] for words in lines if len(words) > 1 and words[0] == "nameserver"]
                self._servers = [server for server in named if _is_address(server)][:_MAX_SERVERS]
                self._read_when = version
        except OSError:
            pass  # While the file is replaced, the name servers of before are asked.
        return self._servers or ["127.0.0.1"]  # as the C library does

    async def ask(self, question: Question) -> tuple[Answer, bytes] | None:
        """Ask the name servers, one after another.

        Returns:
            The answer, and the message that it was read from; None if none has answered in time.
        """
        for _ in range(_ROUNDS):
            for server in self.list_servers():
                try:
                    answer, data = await asyncio.wait_for(_ask_by_packet(server, question), _ANSWER_WITHIN_S)
                    if answer.is_truncated:
                        answer, data = await asyncio.wait_for(_ask_by_connection(server, question), _ANSWER_WITHIN_S)
                except (OSError, DnsError, asyncio.TimeoutError, asyncio.IncompleteReadError):
                    continue
                return answer, data
        return None


def _is_address(text: str) -> bool:
    """Return whether a name server can be asked. One with the scope of a link cannot: to read that, asyncio needs a thread, see `uplink`."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text


class _Reply(asyncio.DatagramProtocol):
    """Waits for the packet that answers a query. Packets that do not are ignored."""

    def __init__(self, question: Question, number: int) -> None:
        self._question, self._number = question, number
        self.answered: asyncio.Future[tuple[Answer, bytes]] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, addr: object) -> None:
        """See `DatagramProtocol`."""
        if self.answered.done():
            return
        try:
            self.answered.set_result((read_answer(data, self._question, self._number), data))
        except DnsError:
            pass  # Whoever can send packets can send wrong ones. The right one may still come.

    def error_received(self, exc: Exception) -> None:
        """See `DatagramProtocol`. The kernel says that nobody listens there."""
        if not self.answered.done():
            self.answered.set_exception(exc)


async def _ask_by_packet(server: str, question: Question) -> tuple[Answer, bytes]:
    """The kernel gives each query a socket with a port of its own, and passes on only what comes from this server."""
    number = secrets.randbelow(1 << 16)
    transport, reply = await asyncio.get_running_loop().create_datagram_endpoint(lambda: _Reply(question, number), remote_addr=(server, _PORT))
    try:
        transport.sendto(write_query(question, number))
        return await reply.answered
    finally:
        transport.close()


async def _ask_by_connection(server: str, question: Question) -> tuple[Answer, bytes]:
    number = secrets.randbelow(1 << 16)
    reader, writer = await asyncio.open_connection(server, _PORT, flags=socket.AI_NUMERICHOST)
    try:
        query = write_query(question, number)
        writer.write(struct.pack("!H", len(query)) + query)
        (length,) = struct.unpack("!H", await reader.readexactly(2))
        data = await reader.readexactly(length)
        return read_answer(data, question, number), data
    finally:
        writer.close()

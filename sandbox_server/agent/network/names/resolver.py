"""The resolver of the slots: it answers with the names that a slot may ask for, and with the addresses that the slot may reach."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any, Callable, Mapping, Sequence

from sandbox_server.agent.network.names import dns_messages as dns
from sandbox_server.agent.network.names.name_servers import NameServers

log = logging.getLogger(__name__)

_MAX_QUESTIONS, _MAX_QUESTIONS_OF_SLOT = 1024, 64
_MAX_CONNECTIONS, _MAX_CONNECTIONS_OF_SLOT = 256, 16
_IDLE_S = 10.0
_MAX_QUESTION_BYTES = 1024
_MAX_PACKETS_A_TURN = 32
#: Whole zones, and everything there is about a name: no program needs them, and the answers are large.
_REFUSED_KINDS = range(251, 256)


class Resolver:
    """Answers the questions of slots.

    Args:
        servers: the name servers that are asked.
        may_ask: whether the slot with this address may ask for this name.
        open_addresses: called with the address of the slot and with the addresses and the time (in seconds) of an answer, before the slot gets it. Returns
            those of the addresses that the slot can reach now. It may raise OSError.
    """

    def __init__(self, servers: NameServers, may_ask: Callable[[str, str], bool], open_addresses: Callable[[str, Sequence[str], int], Sequence[str]]) -> None:
        self._servers = servers
        self._may_ask = may_ask
        self._open_addresses = open_addresses
        self._questions: dict[str, int] = {}
        self._connections: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def serve_packets(self, sock: socket.socket) -> None:
        """Answer the questions that come over UDP."""
        sock.setblocking(False)
        asyncio.get_running_loop().add_reader(sock.fileno(), self._read_packets, sock)

    def _read_packets(self, sock: socket.socket) -> None:
        for _ in range(_MAX_PACKETS_A_TURN):
            try:
                data, (slot, port) = sock.recvfrom(_MAX_QUESTION_BYTES)
            except OSError:  # BlockingIOError: everything is read. Others concern one packet.
                return
            try:
                question = dns.read_question(data)
            except dns.DnsError:
                continue
            if not _count(self._questions, slot, _MAX_QUESTIONS, _MAX_QUESTIONS_OF_SLOT):
                _send(sock, dns.write_answer(question, dns.SERVER_FAILURE), (slot, port))
                continue
            task = asyncio.get_running_loop().create_task(self._answer_packet(sock, question, slot, port))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer_packet(self, sock: socket.socket, question: dns.Question, slot: str, port: int) -> None:
        try:
            answer = await self._answer(question, slot)
        finally:
            _discount(self._questions, slot)
        if len(answer) > question.size:
            answer = dns.write_answer(question, dns.NO_ERROR, is_truncated=True)
        _send(sock, answer, (slot, port))

    async def serve_connections(self, sock: socket.socket) -> asyncio.AbstractServer:
        """Answer the questions that come over TCP."""
        return await asyncio.start_server(self._serve_connection, sock=sock, limit=_MAX_QUESTION_BYTES)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        slot = writer.get_extra_info("peername")[0]
        if not _count(self._connections, slot, _MAX_CONNECTIONS, _MAX_CONNECTIONS_OF_SLOT):
            writer.transport.abort()
            return
        try:
            while True:
                (length,) = struct.unpack("!H", await asyncio.wait_for(reader.readexactly(2), _IDLE_S))
                if length > _MAX_QUESTION_BYTES:
                    return
                question = dns.read_question(await asyncio.wait_for(reader.readexactly(length), _IDLE_S))
                answer = await self._answer(question, slot)
                writer.write(struct.pack("!H", len(answer)) + answer)
                await asyncio.wait_for(writer.drain(), _IDLE_S)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, dns.DnsError):
            return
        finally:
            _discount(self._connections, slot)
            writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _answer(self, question: dns.Question, slot: str) -> bytes:
        if question.kind in _REFUSED_KINDS:
            return dns.write_answer(question, dns.REFUSED)
        if not self._may_ask(slot, question.name):
            return dns.write_answer(question, dns.NO_SUCH_NAME)
        if question.kind in (dns.TYPE_AAAA, dns.TYPE_SVCB, dns.TYPE_HTTPS):
            return dns.write_answer(question, dns.NO_ERROR)  # Slots have no IPv6, and the other two may name addresses that are not checked.
        answered = await self._servers.ask(question)
        if answered is None:
            return dns.write_answer(question, dns.SERVER_FAILURE)
        answer, data = answered
        if question.kind != dns.TYPE_A:
            return dns.with_number(data, question.number)
        try:
            addresses = self._open_addresses(slot, answer.addresses, answer.time_s) if answer.addresses else ()
        except OSError as error:
            log.error("the addresses of a name could not be opened for a slot: %s", error)
            return dns.write_answer(question, dns.SERVER_FAILURE)
        return dns.write_answer(question, answer.code, addresses, answer.time_s)


def _send(sock: socket.socket, data: bytes, address: Any) -> None:
    try:
        sock.sendto(data, address)
    except OSError:
        pass  # The slot has ended, or its answers do not fit into its buffer. It asks again, as after every lost packet.


def _count(counts: dict[str, int], slot: str, most: int, most_of_slot: int) -> bool:
    """Count one more for a slot, unless there are too many of it or of all slots. Returns whether it was counted."""
    if counts.get(slot, 0) >= most_of_slot or _total(counts) >= most:
        return False
    counts[slot] = counts.get(slot, 0) + 1
    return True


def _discount(counts: dict[str, int], slot: str) -> None:
    counts[slot] -= 1
    if not counts[slot]:
        del counts[slot]


def _total(counts: Mapping[str, int]) -> int:
    return sum(counts.values())

"""The connections that the kernel follows in the network namespace of the router, and the end of those of a slot."""

from __future__ import annotations

import errno
import socket
import struct
import time

from sandbox_server.agent.network.addresses import UPLINK

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterator, Tuple

_NETFILTER, _NEW, _GET, _DELETE = 12, 0x100, 0x101, 0x102
_REQUEST, _DUMP = 1, 0x300
_ERROR, _DONE = 2, 3
_HEADER, _FAMILY = struct.Struct("=IHHII"), struct.pack("=BBH", socket.AF_INET, 0, 0)
_ORIGINAL, _REPLY, _FILTER = 1, 2, 25
_TUPLE_IP, _TUPLE_PROTOCOL, _IP_SOURCE, _IP_DESTINATION, _NUMBER, _SOURCE_PORT, _DESTINATION_PORT = 1, 2, 1, 2, 1, 2, 3
_FILTER_ORIGINAL_FLAGS, _FILTER_IP_SOURCE = 1, 1
_NESTED, _KIND_BITS = 0x8000, 0x3FFF
_RECEIVE_BYTES = 1 << 18
_IP, _TCP = struct.Struct("!BBHHHBBH4s4s"), struct.Struct("!HHIIBBHHH")
_RESET = 4
#: The queue of the uplink's device holds some hundred packets. More of them at once would be lost.
_RESETS_AT_ONCE, _PAUSE_S = 32, 0.002


def end_connections(slot: str) -> int:
    """End the connections of a slot whose link is gone: tell the uplink of each one over TCP that it is reset, and let the kernel forget all.

    The processes of the slot are gone, so nobody else would tell the uplink, which would keep the connections for hours.

    Args:
        slot: the address of the slot.

    Returns:
        How many there were.

    Raises:
        OSError: the kernel has refused it.
    """
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETFILTER)
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
    try:
        entries = list(_list_entries(sock, socket.inet_aton(slot)))
        for count, (original, reply) in enumerate(entries, 1):
            # The entry ends before the reset is sent, so that the kernel does not take the reset for a packet of the connection and translate its port.
            sock.send(_message(_DELETE, 0, _FAMILY + _attribute(_ORIGINAL | _NESTED, original)))
            if _protocol(reply) == socket.IPPROTO_TCP and _attributes(_attributes(reply)[_TUPLE_IP])[_IP_DESTINATION] == socket.inet_aton(UPLINK):
                packet, to = _reset_packet(reply)
                raw.sendto(packet, (to, 0))
            if count % _RESETS_AT_ONCE == 0:
                time.sleep(_PAUSE_S)
        return len(entries)
    finally:
        sock.close()
        raw.close()


def _list_entries(sock: socket.socket, slot: bytes) -> Iterator[Tuple[bytes, bytes]]:
    """Return the two directions of each connection: of the packets of the slot, and of those from outside, whose destination is the port on the uplink."""
    chosen = _attribute(_FILTER_ORIGINAL_FLAGS, struct.pack("=I", _FILTER_IP_SOURCE))
    # Kernels before 5.8 do not know the filter and send all entries.
    source = _attribute(_ORIGINAL | _NESTED, _attribute(_TUPLE_IP | _NESTED, _attribute(_IP_SOURCE, slot)))
    sock.send(_message(_GET, _DUMP, _FAMILY + source + _attribute(_FILTER | _NESTED, chosen)))
    while True:
        data = sock.recv(_RECEIVE_BYTES)
        while len(data) >= _HEADER.size:
            length, kind, _, _, _ = _HEADER.unpack_from(data)
            content, data = data[_HEADER.size : length], data[(length + 3) & ~3 :]
            if kind == _DONE:
                return
            if kind == _ERROR:
                raise OSError(-int(struct.unpack_from("=i", content)[0]) or errno.EPROTO, "the connections of a slot could not be listed")
            attributes = _attributes(content[len(_FAMILY) :])
            original = attributes.get(_ORIGINAL, b"")
            if kind == _NEW and _attributes(_attributes(original).get(_TUPLE_IP, b"")).get(_IP_SOURCE) == slot:
                yield original, attributes[_REPLY]


def _protocol(direction: bytes) -> int:
    return _attributes(_attributes(direction)[_TUPLE_PROTOCOL])[_NUMBER][0]


def _reset_packet(reply: bytes) -> Tuple[bytes, str]:
    """Return a packet that resets a connection, as the slot's side of the uplink would send it, and the address of the host."""
    addresses, ports = _attributes(_attributes(reply)[_TUPLE_IP]), _attributes(_attributes(reply)[_TUPLE_PROTOCOL])
    source, destination = addresses[_IP_DESTINATION], addresses[_IP_SOURCE]
    ports_packed = (struct.unpack("!H", ports[_DESTINATION_PORT])[0], struct.unpack("!H", ports[_SOURCE_PORT])[0])
    segment = _TCP.pack(*ports_packed, 0, 0, 5 << 4, _RESET, 0, 0, 0)
    pseudo_header = source + destination + struct.pack("!BBH", 0, socket.IPPROTO_TCP, len(segment))
    segment = _TCP.pack(*ports_packed, 0, 0, 5 << 4, _RESET, 0, _checksum(pseudo_header + segment), 0)
    header = _IP.pack(0x45, 0, _IP.size + len(segment), 0, 0, 64, socket.IPPROTO_TCP, 0, source, destination)
    return header + segment, socket.inet_ntoa(destination)


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack("!%dH" % (len(data) // 2), data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~((total >> 16) + total) & 0xFFFF


def _message(kind: int, flags: int, content: bytes) -> bytes:
    return _HEADER.pack(_HEADER.size + len(content), kind, _REQUEST | flags, 1, 0) + content


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", len(value) + 4, kind) + value + b"\0" * (-len(value) % 4)


def _attributes(data: bytes) -> Dict[int, bytes]:
    found: Dict[int, bytes] = {}
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if not 4 <= length <= len(data):
            break
        found[kind & _KIND_BITS] = data[4:length]
        data = data[(length + 3) & ~3 :]
    return found

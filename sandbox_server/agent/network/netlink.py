"""Messages to the kernel that make and remove links, addresses and routes of a network namespace."""

from __future__ import annotations

import errno
import os
import socket
import struct

from sandbox_server.agent.network.addresses import ROUTER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, List, Optional, Set, Tuple

_NEWLINK, _DELLINK, _NEWADDR, _GETADDR, _NEWROUTE, _GETROUTE = 16, 17, 20, 22, 24, 26
_REQUEST, _ACK, _DUMP, _CREATE, _EXCLUSIVE = 1, 4, 0x300, 0x400, 0x200
_ERROR, _DONE = 2, 3
_DUMP_INTERRUPTED, _ATTEMPTS = 0x10, 10
_ROUTE_PREFIX_AT, _ROUTE_TYPE_AT, _LOCAL_ROUTES = 1, 7, (2, 3)  # local and broadcast
_IFF_UP = 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, number, port
_LINK, _ADDRESS, _ROUTE = struct.Struct("=BxHiII"), struct.Struct("=BBBBI"), struct.Struct("=BBBBBBBBI")
_LINK_NAME, _LINK_MTU, _LINK_INFO, _LINK_NAMESPACE_FD = 3, 4, 18, 28
_INFO_KIND, _INFO_DATA, _VETH_PEER = 1, 2, 1
_ADDRESS_ADDRESS, _ADDRESS_LOCAL = 1, 2
_ROUTE_DESTINATION, _ROUTE_LINK, _ROUTE_GATEWAY = 1, 4, 5
_MAIN_TABLE, _BY_BOOT, _SCOPE_UNIVERSE, _SCOPE_LINK, _UNICAST = 254, 3, 0, 253, 1
_ANSWER_BYTES = 1 << 16
#: The largest packet of the uplink. On links within one machine, large packets save most of the work.
MTU = 65520


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", len(value) + 4, kind) + value + b"\0" * (-len(value) % 4)


def _pack_ip(address: str) -> bytes:
    return socket.inet_aton(address)


class Netlink:
    """The links, addresses and routes of the network namespace in which the object is made. It stays the object's when this process enters another one."""

    def __init__(self) -> None:
        self._sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._number = 0

    def close_socket(self) -> None:
        """Close the connection to the kernel."""
        self._sock.close()

    def _ask(self, subject: str, kind: int, flags: int, content: bytes) -> None:
        self._number += 1
        self._sock.send(_HEADER.pack(_HEADER.size + len(content), kind, _REQUEST | _ACK | flags, self._number, 0) + content)
        for answer_kind, _, number, answer in _split(self._sock.recv(_ANSWER_BYTES)):
            if answer_kind == _ERROR and number == self._number:
                code = -int(struct.unpack_from("=i", answer)[0])
                if code:
                    raise OSError(code, "%s: %s" % (subject, os.strerror(code)))
                return
        raise OSError(errno.EPROTO, "%s: the kernel has not answered the request" % subject)

    def add_veth(self, index: int, name: str, peer_index: int, peer: str, peer_namespace_fd: int) -> None:
        """Make a pair of links. One is in this namespace, its peer in another one.

        Args:
            index: of the link here.
            name: of the link here.
            peer_index: the index of the other one, in its namespace.
            peer: the name of the other one.
            peer_namespace_fd: a descriptor of the network namespace of the other one.

        Raises:
            OSError: the kernel has refused it.
        """
        mtu = _attribute(_LINK_MTU, struct.pack("=I", MTU))
        other = _LINK.pack(0, 0, peer_index, 0, 0) + _attribute(_LINK_NAME, peer.encode() + b"\0") + mtu
        other += _attribute(_LINK_NAMESPACE_FD, struct.pack("=i", peer_namespace_fd))
        info = _attribute(_INFO_KIND, b"veth\0") + _attribute(_INFO_DATA, _attribute(_VETH_PEER, other))
        content = _LINK.pack(0, 0, index, 0, 0) + _attribute(_LINK_NAME, name.encode() + b"\0") + mtu + _attribute(_LINK_INFO, info)
        self._ask("a pair of links", _NEWLINK, _CREATE | _EXCLUSIVE, content)

    def delete_link(self, index: int) -> None:
        """Remove a link, with its peer. A link that is not there any more is no error."""
        try:
            self._ask("the end of a link", _DELLINK, 0, _LINK.pack(0, 0, index, 0, 0))
        except OSError as error:
            if error.errno != errno.ENODEV:
                raise

    def start_link(self, index: int) -> None:
        """Let a link send and receive."""
        self._ask("the start of a link", _NEWLINK, 0, _LINK.pack(0, 0, index, _IFF_UP, _IFF_UP))

    def set_mtu(self, index: int) -> None:
        """Give a link the largest packets."""
        self._ask("the size of packets", _NEWLINK, 0, _LINK.pack(0, 0, index, 0, 0) + _attribute(_LINK_MTU, struct.pack("=I", MTU)))

    def add_address(self, index: int, address: str, prefix: int = 32) -> None:
        """Give a link an IPv4 address."""
        packed = _pack_ip(address)
        content = _ADDRESS.pack(socket.AF_INET, prefix, 0, 0, index) + _attribute(_ADDRESS_LOCAL, packed) + _attribute(_ADDRESS_ADDRESS, packed)
        self._ask("the address of a link", _NEWADDR, _CREATE | _EXCLUSIVE, content)

    def add_route(self, index: int, address: str) -> None:
        """Send everything for one address over a link on which it is a neighbour."""
        content = _ROUTE.pack(socket.AF_INET, 32, 0, 0, _MAIN_TABLE, _BY_BOOT, _SCOPE_LINK, _UNICAST, 0)
        content += _attribute(_ROUTE_DESTINATION, _pack_ip(address)) + _attribute(_ROUTE_LINK, struct.pack("=I", index))
        self._ask("a route", _NEWROUTE, _CREATE | _EXCLUSIVE, content)

    def add_default_route(self, index: int, gateway: str = ROUTER) -> None:
        """Send everything else to a neighbour on a link."""
        content = _ROUTE.pack(socket.AF_INET, 0, 0, 0, _MAIN_TABLE, _BY_BOOT, _SCOPE_UNIVERSE, _UNICAST, 0)
        content += _attribute(_ROUTE_GATEWAY, _pack_ip(gateway)) + _attribute(_ROUTE_LINK, struct.pack("=I", index))
        self._ask("the default route", _NEWROUTE, _CREATE | _EXCLUSIVE, content)


def list_local_networks() -> List[str]:
    """Return what packets of this network namespace to itself have as their destination: its IPv4 addresses, and the networks of its local routes, sorted.

    Raises:
        OSError: the kernel has refused it.
    """
    for _ in range(_ATTEMPTS):
        found: Set[str] = set()
        asked = ((_GETADDR, _ADDRESS.pack(socket.AF_INET, 0, 0, 0, 0)), (_GETROUTE, _ROUTE.pack(socket.AF_INET, 0, 0, 0, 0, 0, 0, 0, 0)))
        # The kernel says when something has changed meanwhile, so that the list may lack an entry.
        complete = [_add_local_networks(kind, content, found) for kind, content in asked]
        if all(complete):
            return sorted(found)
    raise OSError(errno.EINTR, "the addresses of the machine change all the time, so they could not be listed")


def _add_local_networks(kind: int, content: bytes, found: Set[str]) -> bool:
    """Add the networks in the kernel's answer to a request. Returns whether the answer is complete."""
    is_complete = True
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        sock.send(_HEADER.pack(_HEADER.size + len(content), kind, _REQUEST | _DUMP, 1, 0) + content)
        while True:
            data = sock.recv(_ANSWER_BYTES)
            for answer_kind, flags, _, answer in _split(data):
                is_complete = is_complete and not flags & _DUMP_INTERRUPTED
                if answer_kind == _DONE:
                    return is_complete
                if answer_kind == _ERROR:
                    raise OSError(errno.EPROTO, "the addresses of the machine could not be listed")
                network = _local_network(answer_kind, answer)
                if network is not None:
                    found.add(network)
    finally:
        sock.close()


def _local_network(kind: int, content: bytes) -> Optional[str]:
    if kind == _NEWADDR:
        wanted, prefix, size = _ADDRESS_LOCAL, 32, _ADDRESS.size
    elif kind == _NEWROUTE and content[_ROUTE_TYPE_AT] in _LOCAL_ROUTES:
        wanted, prefix, size = _ROUTE_DESTINATION, content[_ROUTE_PREFIX_AT], _ROUTE.size
    else:
        return None
    for attribute, value in _split_attributes(content[size:]):
        if attribute == wanted and len(value) == 4:
            return "%s/%d" % (socket.inet_ntoa(value), prefix)
    return "0.0.0.0/0" if kind == _NEWROUTE and prefix == 0 else None


def _split(data: bytes) -> Iterator[Tuple[int, int, int, bytes]]:
    """Return the kind, flags, number and content of each message."""
    while len(data) >= _HEADER.size:
        length, kind, flags, number, _ = _HEADER.unpack_from(data)
        if not _HEADER.size <= length <= len(data):
            return
        yield kind, flags, number, data[_HEADER.size : length]
        data = data[(length + 3) & ~3 :]


def _split_attributes(data: bytes) -> Iterator[Tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        if not 4 <= length <= len(data):
            return
        yield kind, data[4:length]
        data = data[(length + 3) & ~3 :]

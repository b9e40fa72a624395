"""The router of the slots: the process that makes their network namespaces, links and rules. It is alone in a network namespace of its own.

It is the first process of a process namespace, so that the kernel ends the uplink with it. It serves one socket, whose other end has the network process: it
reads nothing that a slot or a name server has sent, except through the kernel.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import json
import os
import resource
import socket
import struct

from sandbox_server.agent.network import conntrack, rules
from sandbox_server.agent.network.addresses import ROUTER, UPLINK, UPLINK_GATEWAY, slot_address
from sandbox_server.agent.network.netlink import Netlink
from sandbox_server.agent.network.nftables import Nftables
from sandbox_server.agent.template import system_calls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Mapping, NoReturn, Sequence, Tuple

UPLINK_NAME = "uplink"
MESSAGE_BYTES = 1 << 18
_NAMESPACE = "/proc/self/ns/net"
_FIRST_LINK = 1000  # The index of the link of slot 0.
_SLOT_LINK = 2  # The index of a slot's only link beside its loopback interface.
_TUN = "/dev/net/tun"
_TUNSETIFF, _TUNSETPERSIST, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x400454CB, 2, 0x1000
_HALF_CLOSED_S = 7500  # The uplink gives up a connection without traffic after two hours.
_DNS_PORT, _WAITING_CONNECTIONS = 53, 64
_RECEIVE_BYTES = 1 << 20


class Router:
    """The links and rules of a router, in the network namespace of this process.

    Args:
        allow_private: see `rules.base_rules`.
        slots: how many slots the sandbox has.

    Raises:
        OSError: the kernel has refused something, or something is missing. The text says what.
    """

    def __init__(self, allow_private: Sequence[str], slots: int) -> None:
        system_calls.unshare(system_calls.CLONE_NEWNET)
        self.own_fd = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
        self._netlink = Netlink()
        self._nftables = Nftables()
        # The rules come first: nothing is forwarded before they are complete.
        connections = rules.share_connections(slots, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        self.run_rules(rules.base_rules([ipaddress.IPv4Network(text) for text in allow_private], connections))
        self._start_loopback()
        self._netlink.add_address(1, ROUTER)
        self._make_uplink()
        for state in ("fin_wait", "close_wait", "last_ack"):
            # One side has ended such a connection. The uplink keeps it as long as the other side does, so it counts for the slot for as long.
            _write("/proc/sys/net/netfilter/nf_conntrack_tcp_timeout_" + state, str(_HALF_CLOSED_S), may_lack=True)
        _write("/proc/sys/net/ipv4/ip_forward", "1")

    def _start_loopback(self) -> None:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            system_calls.start_loopback(sock.fileno())
        finally:
            sock.close()

    def _make_uplink(self) -> None:
        """Make the device that the program of the uplink attaches to. It stays when that program ends, with its address and routes."""
        try:
            fd = os.open(_TUN, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise OSError(error.errno, "%s cannot be opened: %s" % (_TUN, error.strerror)) from None
        try:
            fcntl.ioctl(fd, _TUNSETIFF, struct.pack("=16sH22x", UPLINK_NAME.encode(), _IFF_TAP | _IFF_NO_PI))
            fcntl.ioctl(fd, _TUNSETPERSIST, 1)
        finally:
            os.close(fd)
        index = socket.if_nametoindex(UPLINK_NAME)
        self._netlink.set_mtu(index)
        self._netlink.add_address(index, UPLINK)
        self._netlink.start_link(index)
        self._netlink.add_route(index, UPLINK_GATEWAY)
        self._netlink.add_default_route(index, UPLINK_GATEWAY)

    def open_resolver_sockets(self) -> List[socket.socket]:
        """Return the sockets on which slots ask for names: one of UDP and one of TCP."""
        packets = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        packets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BYTES)
        packets.bind((ROUTER, _DNS_PORT))
        connections = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connections.bind((ROUTER, _DNS_PORT))
        connections.listen(_WAITING_CONNECTIONS)
        return [packets, connections]

    def run_rules(self, commands: str) -> None:
        """Change the rules, see `Nftables.run_commands`."""
        self._nftables.run_commands(commands)

    def make_slot_network(self, number: int) -> int:
        """Return the descriptor of a new network namespace with a link to this router. The caller closes it.

        The namespace belongs to the user namespace of this process, so a slot in it has no rights over it.
        """
        namespace_fd = inside = None
        try:
            system_calls.unshare(system_calls.CLONE_NEWNET)
            try:
                namespace_fd = os.open(_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
                inside = Netlink()
                self._start_loopback()
                _write("/proc/sys/net/ipv6/conf/default/disable_ipv6", "1", may_lack=True)  # The loopback interface keeps its IPv6 address.
            finally:
                self._return_to_router()
            index, address = _FIRST_LINK + number, slot_address(number)
            self._netlink.add_veth(index, "slot%d" % number, _SLOT_LINK, "eth0", namespace_fd)
            try:
                inside.add_address(_SLOT_LINK, address)
                inside.start_link(_SLOT_LINK)
                inside.add_route(_SLOT_LINK, ROUTER)
                inside.add_default_route(_SLOT_LINK)
                self._netlink.start_link(index)
                self._netlink.add_route(index, address)
            except OSError:
                self._netlink.delete_link(index)
                raise
        except BaseException:
            if namespace_fd is not None:
                os.close(namespace_fd)
            raise
        finally:
            if inside is not None:
                inside.close_socket()
        return namespace_fd

    def _return_to_router(self) -> None:
        try:
            system_calls.join_namespace(self.own_fd, system_calls.CLONE_NEWNET)
        except OSError:
            os._exit(1)  # In the namespace of a slot, the rules of the router would be made for the slot.

    def delete_slot_network(self, number: int) -> None:
        """Remove the link of a slot. The namespace itself ends with its last process and descriptor."""
        self._netlink.delete_link(_FIRST_LINK + number)


def _write(path: str, text: str, may_lack: bool = False) -> None:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if may_lack:
            return  # This kernel has no IPv6, or shows the times of connections to the first network namespace alone.
        raise
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def run_router(sock: socket.socket, allow_private: Sequence[str], slots: int) -> NoReturn:
    """Set the router up, and serve requests of the network process until it has ended.

    Args:
        sock: the socket of the network process. The first message on it is the answer to the set-up.
        allow_private: see `Router`.
        slots: see `Router`.
    """
    ctypes.CDLL(None).prctl(15, b"slot-router", 0, 0, 0)
    try:
        router = Router(allow_private, slots)
        sockets = router.open_resolver_sockets()
        _answer(sock, {"ok": True}, [router.own_fd, *(each.fileno() for each in sockets)])
        for each in sockets:
            each.close()
    except OSError as error:
        _answer(sock, _describe(error), ())
        os._exit(1)
    while True:
        data = sock.recv(MESSAGE_BYTES)
        if not data:
            os._exit(0)
        answer, fds = _handle_request(router, json.loads(data))
        _answer(sock, answer, fds)
        for fd in fds:
            os.close(fd)


def _handle_request(router: Router, request: Mapping[str, Any]) -> Tuple[Mapping[str, Any], Sequence[int]]:
    try:
        if request["op"] == "make":
            return {"ok": True}, [router.make_slot_network(request["number"])]
        if request["op"] == "delete":
            router.delete_slot_network(request["number"])
        elif request["op"] == "end":
            conntrack.end_connections(slot_address(request["number"]))
        else:
            router.run_rules(request["rules"])
    except OSError as error:
        return _describe(error), ()
    return {"ok": True}, ()


def _describe(error: OSError) -> Mapping[str, Any]:
    return {"ok": False, "errno": error.errno or 0, "error": error.strerror or str(error)}


def _answer(sock: socket.socket, answer: Mapping[str, Any], fds: Sequence[int]) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("%di" % len(fds), *fds))] if fds else []
    sock.sendmsg([json.dumps(answer).encode()], rights)

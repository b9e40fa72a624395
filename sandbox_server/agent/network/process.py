"""The network process of an agent: it makes networks for slots, resolves the names that they ask for, and keeps the uplink running.

It has no rights on the machine beside those of an ordinary user, see `confinement`. It ends with the agent, whose socket it serves, and takes the router and
the uplink along.
"""

from __future__ import annotations

import array
import asyncio
import codecs
import ctypes
import ipaddress
import json
import logging
import os
import resource
import signal
import socket
import sys
from typing import Any, Mapping, Sequence

from sandbox_server.agent.allowed_hosts import list_networks, permits_name
from sandbox_server.agent.init import privileges
from sandbox_server.agent.network import confinement, netlink, rules
from sandbox_server.agent.network.addresses import UPLINK, UPLINK_GATEWAY, is_reachable, is_reverse_of_closed, slot_address, slot_number
from sandbox_server.agent.network.names.name_servers import NameServers
from sandbox_server.agent.network.names.resolver import Resolver
from sandbox_server.agent.network.network_messages import LIMIT, MAKE, MESSAGE_BYTES
from sandbox_server.agent.network.router import run_router
from sandbox_server.agent.network.router_client import RouterClient
from sandbox_server.agent.network.slot_table import SlotTable
from sandbox_server.agent.network.uplink import Uplink, find_uplink_program

log = logging.getLogger(__name__)

_CHANGES = 0x10 | 0x40  # The groups of netlink messages about IPv4 addresses and routes.
_PREPARED = 2
_CONNECTIONS_END_AFTER_S = 0.5


class NetworkProcess:
    """Serves the requests of the agent.

    Args:
        sock: the socket of the agent.
        router: the router.
        settings: the first message of the agent.
    """

    def __init__(self, sock: socket.socket, router: RouterClient, settings: Mapping[str, Any]) -> None:
        self._loop = asyncio.get_running_loop()
        self._sock = sock
        self._router = router
        self._private = [ipaddress.IPv4Network(text) for text in settings["allow_private"]]
        self._slots = SlotTable(settings["allow_hosts"])
        self._host_networks: Sequence[ipaddress.IPv4Network] = ()
        self._prepared: list[tuple[int, int]] = []
        self._ended = self._loop.create_future()

    async def serve_agent(self, packets: socket.socket, connections: socket.socket) -> None:
        """Start everything, report that to the agent, and serve it until it has ended.

        Args:
            packets: the socket for questions over UDP.
            connections: the socket for questions over TCP.

        Raises:
            OSError: something cannot be started, or the router has ended. The text says what.
        """
        changes = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.NETLINK_ROUTE)
        changes.bind((0, _CHANGES))  # first, so that no change is missed
        self._read_host_addresses()
        uplink = Uplink(find_uplink_program(), confinement.NAMESPACE_PATH, UPLINK, UPLINK_GATEWAY, self._fail)
        await uplink.start_uplink()
        self._loop.add_reader(changes.fileno(), self._on_address_change, changes)
        # The router only answers, so between requests nothing but its end can be read.
        self._loop.add_reader(self._router.fileno(), self._fail, "the router of the slots has ended")
        resolver = Resolver(NameServers(), self._may_ask, self._open_addresses, self._slots.count_slots, *_resolver_limits())
        resolver.serve_packets(packets)
        await resolver.serve_connections(connections)
        users_fd = os.open("/proc/self/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        send_answer(self._sock, {"ok": True}, [users_fd])
        os.close(users_fd)
        self._sock.setblocking(False)
        self._loop.add_reader(self._sock.fileno(), self._read_requests)
        self._loop.call_soon(self._prepare_networks)
        await self._ended

    def _fail(self, reason: str) -> None:
        if not self._ended.done():
            self._ended.set_exception(OSError(reason))

    # The addresses of the machine.

    def _on_address_change(self, changes: socket.socket) -> None:
        try:
            while changes.recv(1 << 16):
                pass
        except BlockingIOError:
            pass
        except OSError as error:
            log.info("changes of the machine's addresses were lost, so they are listed again: %s", error)
        try:
            self._read_host_addresses()
        except OSError as error:
            self._fail("the addresses of the machine cannot be kept from slots: %s" % error)

    def _read_host_addresses(self) -> None:
        networks = [ipaddress.IPv4Network(text) for text in netlink.list_local_networks()]
        if networks != self._host_networks:
            self._router.run_rules(rules.host_address_rules(networks))
            self._host_networks = networks

    # Names.

    def _may_ask(self, slot: str, name: str) -> bool:
        number = slot_number(slot)
        entries = self._slots.find_limit(number)
        return self._slots.has_slot(number) and not is_reverse_of_closed(name, self._private) and (entries is None or permits_name(entries, name))

    def _open_addresses(self, slot: str, addresses: Sequence[str], time_s: int, most: int) -> Sequence[str]:
        self._read_requests()  # The agent waits for its answers, and a change of rules takes a while: it comes first.
        number = slot_number(slot)
        if not self._slots.has_slot(number):
            return []
        reachable = [text for text in addresses if is_reachable(ipaddress.IPv4Address(text), self._private, self._host_networks)][:most]
        entries = self._slots.find_limit(number)
        if entries is None:
            return reachable
        networks = list_networks(entries)
        always = [text for text in reachable if any(ipaddress.IPv4Address(text) in network for network in networks)]
        permitted, opened, open_s = self._slots.open_addresses(number, [text for text in reachable if text not in always], time_s, self._loop.time())
        if opened:
            self._router.run_rules(rules.permit_rules(slot, opened, open_s))
        return [*always, *permitted]

    # The requests of the agent.

    def _read_requests(self) -> None:
        while True:
            try:
                data = self._sock.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            if not data:
                if not self._ended.done():
                    self._ended.set_result(None)
                return
            try:
                answer, fds = self._handle_request(json.loads(data))
            except OSError as error:
                answer, fds = {"ok": False, "errno": error.errno or 0, "error": error.strerror or str(error)}, []
            send_answer(self._sock, answer, fds)
            for fd in fds:
                os.close(fd)

    def _handle_request(self, request: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[int]]:
        if request["op"] == MAKE:
            number, fd = self._prepared.pop(0) if self._prepared else self._make_network()
            self._loop.call_soon(self._prepare_networks)
            return {"ok": True, "number": number}, [fd]
        number = request["number"]
        if request["op"] == LIMIT:
            self._limit_slot(number, request["allow_hosts"])
        else:
            self._release_network(number)
        return {"ok": True}, []

    def _make_network(self) -> tuple[int, int]:
        number = self._slots.add_slot()
        try:
            fd = self._router.make_slot_network(number)
        except OSError:
            self._slots.remove_slot(number)
            raise
        entries = self._slots.find_limit(number)
        if entries is not None:
            try:
                self._limit_slot(number, entries)
            except OSError:
                os.close(fd)
                self._release_network(number)
                raise
        return number, fd

    def _prepare_networks(self) -> None:
        """Make the next networks ahead, so that no slot waits for one."""
        try:
            while len(self._prepared) < _PREPARED and not self._ended.done():
                self._prepared.append(self._make_network())
        except OSError as error:
            log.warning("a network could not be prepared for a slot: %s", error)

    def _limit_slot(self, number: int, entries: Sequence[str]) -> None:
        """Let a slot reach these hosts alone. No process of the slot has used its network yet."""
        change = rules.change_limit_rules if self._slots.is_limited(number) else rules.limit_rules
        self._router.run_rules(change(slot_address(number), list_networks(entries)))
        self._slots.limit_slot(number, entries)

    def _release_network(self, number: int) -> None:
        """Remove a network. If the router refuses something, the slot is still known, and a second try removes the rest."""
        self._router.delete_slot_network(number)
        if self._slots.is_limited(number):
            self._router.run_rules(rules.forget_rules(slot_address(number)))
        self._slots.remove_slot(number)
        # The uplink first handles what the slot has sent. It does not see a reset that it reads together with the end of the slot's side of the connection.
        self._loop.call_later(_CONNECTIONS_END_AFTER_S, self._end_connections, number)

    def _end_connections(self, number: int) -> None:
        try:
            self._router.end_connections(number)
        except OSError as error:
            log.warning("the uplink may keep connections of a slot that has ended: %s", error)


def _resolver_limits() -> tuple[int, int]:
    """Return how many questions and connections of all slots can wait, so that descriptors are left for the networks of slots."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return min(descriptors // 3, 1024), min(descriptors // 6, 256)


def send_answer(sock: socket.socket, answer: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send an answer to the agent. If the agent has ended, this process ends as well."""
    try:
        sock.sendmsg([json.dumps(answer).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else [])
    except OSError:
        sys.exit(1)


def _import_what_is_needed_later() -> None:
    """Import now what the library of Python would import later, when this process may not have the right to read the files of its interpreter."""
    for name in ("ascii", "idna", "latin-1", "utf-8"):
        codecs.lookup(name)
    "names of hosts".encode("idna")
    logging.Formatter().formatException((OSError, OSError("so that the library of tracebacks is there"), None))


def main() -> None:
    """Set everything up as the first message of the agent says, and serve the agent. The argument is the descriptor of its socket."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    ctypes.CDLL(None).prctl(15, b"slot-network", 0, 0, 0)
    os.umask(0o077)
    os.chdir("/")
    settings = json.loads(sock.recv(MESSAGE_BYTES))
    _import_what_is_needed_later()
    try:
        find_uplink_program()
        confinement.enter_user_namespace(settings["uid"])
        privileges.die_with_parent(signal.SIGKILL)
        if os.getppid() != settings["parent"]:
            sys.exit(1)  # The agent has ended.
        pid, router_end = confinement.fork_router()
        if pid == 0:
            sock.close()
            run_router(router_end, settings["allow_private"], settings["slots"])
        asyncio.run(_serve(sock, RouterClient(router_end), settings))
    except OSError as error:
        send_answer(sock, {"ok": False, "errno": error.errno or 0, "error": error.strerror or str(error)})
        log.error("the network of the slots has ended: %s", error)
        sys.exit(1)


async def _serve(sock: socket.socket, router: RouterClient, settings: Mapping[str, Any]) -> None:
    namespace_fd, packets, connections = router.receive_set_up()
    confinement.keep_namespace(namespace_fd)
    os.close(namespace_fd)
    await NetworkProcess(sock, router, settings).serve_agent(packets, connections)

"""What the agent accepts as the connection to a port of a slot. The process that makes it runs in the slot."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import psutil
import pytest

from sandbox_server.agent.errors import Refused
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.port_connector import connect_to_port
from sandbox_server.agent.execution.slot_runtime import SlotRuntime

Child = Callable[[socket.socket, Any], None]
OK = {"ok": True}


class FakeLink:
    """The link to an init whose child is a function of the test. It records what init is asked for."""

    closed = False

    def __init__(self, child: Child) -> None:
        self._child = child
        self.asked: list[dict[str, Any]] = []
        self._listener: Any = None

    def start_process(self, request: dict[str, Any], fds: Sequence[int], listener: Any) -> int:
        self._listener = listener
        self.asked.append(request)
        with socket.socket(fileno=os.dup(fds[0])) as reply_socket:
            self._child(reply_socket, listener)
        return 7

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> asyncio.Future[int]:
        self.asked.append(request)
        answer = asyncio.get_running_loop().create_future()
        answer.set_result(0)
        self._listener.on_process_ended(9, 0.0, 0)
        return answer

    def release_spawn(self, number: int) -> float:
        return 0.0


class FakeRuntime:
    def __init__(self, child: Child) -> None:
        self.link = FakeLink(child)


async def connect(runtime: FakeRuntime, port: int) -> socket.socket:
    return await connect_to_port(cast(SlotRuntime, runtime), BackgroundTasks("0"), port, 0.2)


def reply(header: dict[str, Any], *sent: socket.socket | int) -> Child:
    """A child that replies with this header and these descriptors."""
    document = json.dumps(header).encode()

    def child(reply_socket: socket.socket, listener: Any) -> None:
        socket.send_fds(reply_socket, [struct.pack(">I", len(document)) + document], [file if isinstance(file, int) else file.fileno() for file in sent])

    return child


def listener_on(address: str = "127.0.0.1", family: int = socket.AF_INET) -> tuple[socket.socket, int]:
    server = socket.socket(family)
    server.bind((address, 0))
    server.listen()
    return server, server.getsockname()[1]


async def test_a_connection_to_the_port_is_accepted() -> None:
    server, port = listener_on()
    with server, socket.create_connection(("127.0.0.1", port)) as made:
        runtime = FakeRuntime(reply(OK, made))
        with await connect(runtime, port) as connection:
            assert connection.getpeername() == ("127.0.0.1", port)
            assert not connection.getblocking()

    assert runtime.link.asked == [{"op": "fork", "tool": "route_connect", "args": {"port": port}, "env": None, "fds": ["out"]}]


async def test_whatever_else_is_sent_is_refused_and_closed() -> None:
    server, port = listener_on()
    other_server, other_port = listener_on()
    one, two = socket.socketpair()
    read_fd, write_fd = os.pipe()
    with server, other_server, one, two, socket.socket() as unconnected, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        datagrams.connect(("127.0.0.1", port))
        with socket.create_connection(("127.0.0.1", port)) as made, socket.create_connection(("127.0.0.1", other_port)) as elsewhere:
            children = [
                reply(OK), reply(OK, elsewhere), reply(OK, one), reply(OK, unconnected), reply(OK, datagrams), reply(OK, read_fd), reply(OK, made, made),
                reply({"ok": False}, made), reply({"ok": "yes"}, made),
            ]  # fmt: skip
            before = psutil.Process().num_fds()
            for child in children:
                with pytest.raises(Refused) as refused:
                    await connect(FakeRuntime(child), port)
                assert refused.value.code == "internal", refused.value.detail
            assert psutil.Process().num_fds() == before
    os.close(read_fd)
    os.close(write_fd)


async def test_what_the_child_says_is_passed_on() -> None:
    with pytest.raises(Refused, match="nothing listens") as refused:
        await connect(FakeRuntime(reply({"ok": False, "code": "port_closed", "detail": "nothing listens", "errno": "ECONNREFUSED"})), 80)

    assert (refused.value.code, refused.value.errno) == ("port_closed", "ECONNREFUSED")


@pytest.mark.parametrize(
    ("report", "why"),
    [
        (lambda listener: listener.on_process_ended(9, 0.0, 0), "the process that connects has ended early"),
        (lambda listener: listener.on_process_refused(11, "fork"), "the slot cannot start anything: Resource temporarily unavailable"),
        (lambda listener: listener.on_init_lost("killed"), "the slot's init has ended: killed"),
    ],
    ids=["ended", "refused", "lost"],
)
async def test_a_child_that_ends_without_a_reply_closes_the_port(report: Callable[[Any], None], why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        await connect(FakeRuntime(lambda reply_socket, listener: report(listener)), 80)

    assert refused.value.code == "port_closed"


async def test_a_child_that_does_not_reply_in_time_is_killed() -> None:
    held: list[socket.socket] = []
    runtime = FakeRuntime(lambda reply_socket, listener: held.append(reply_socket.dup()))
    with pytest.raises(Refused, match=r"could not be connected to within 0\.2 s") as refused:
        await connect(runtime, 80)
    await asyncio.sleep(0)

    assert refused.value.code == "port_closed"
    assert runtime.link.asked[1] == {"op": "signal", "id": 7, "signal": 9}
    held[0].close()

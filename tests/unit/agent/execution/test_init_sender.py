"""Sending to init while the kernel is short of something: the message waits or fails, and init does not count as lost."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator

import pytest

from sandbox_server.agent.execution.in_flight_descriptors import find_slot_to_blame
from sandbox_server.agent.execution.init_client import init_sender
from sandbox_server.agent.execution.init_client.descriptors import max_drains, slot_limit
from sandbox_server.agent.execution.init_client.init_sender import InitSender


class ShortSocket(socket.socket):
    """A socket that refuses to send descriptors while `error` is set."""

    error = 0

    def sendmsg(self, *args: object) -> int:  # type: ignore[override]
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        return super().sendmsg(*args)  # type: ignore[arg-type]


class Ends:
    """A sender, the calls of its callbacks, and the other end of its socket."""

    def __init__(self) -> None:
        ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock = ShortSocket(fileno=ours.detach())
        self.sock.setblocking(False)
        self.theirs.setblocking(False)
        self.lost: list[str] = []
        self.full = 0
        self.sender = InitSender(asyncio.get_running_loop(), self.sock, self.lost.append, self._full)

    def _full(self) -> None:
        self.full += 1

    def heard(self) -> list[bytes]:
        messages = []
        while True:
            try:
                messages.append(self.theirs.recv(100))
            except BlockingIOError:
                return messages


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    ends = Ends()
    yield ends
    ends.sender.close_sender()
    ends.sock.close()
    ends.theirs.close()


def never(number: int) -> None:
    raise AssertionError(f"refused with {errno.errorcode[number]}")


@pytest.mark.parametrize("number", [errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM])
async def test_a_temporary_refusal_delays_a_message_and_lets_others_overtake_it(ends: Ends, number: int) -> None:
    ends.sock.error = number
    ends.sender.send_message(b"first", [0], 1, never)
    ends.sender.send_message(b"second", [0], 2, never)
    ends.sender.send_message(b"without", [], 0, never)
    await asyncio.sleep(0.05)
    assert ends.heard() == [b"without"]

    ends.sock.error = 0
    heard: list[bytes] = []
    async with asyncio.timeout(5):
        while len(heard) < 2:
            await asyncio.sleep(0.005)
            heard += ends.heard()

    assert heard == [b"first", b"second"]
    assert ends.lost == []
    assert (ends.full > 0) == (number == errno.ETOOMANYREFS)


async def test_a_lasting_refusal_fails_that_message_only(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_sender, "RETRY_WITHIN_S", 0.05)
    ends.sock.error = errno.ETOOMANYREFS
    refused: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ends.sender.send_message(b"first", [0], 1, refused.set_result)

    assert await asyncio.wait_for(refused, 5) == errno.ETOOMANYREFS
    assert ends.lost == []


async def test_a_queued_message_can_be_withdrawn(ends: Ends) -> None:
    ends.sock.error = errno.ETOOMANYREFS
    refused: list[int] = []
    ends.sender.send_message(b"first", [0], 1, refused.append)
    ends.sender.send_message(b"second", [0], 2, never)

    assert ends.sender.withdraw_message(1)
    assert not ends.sender.withdraw_message(1)
    ends.sock.error = 0
    heard: list[bytes] = []
    async with asyncio.timeout(5):
        while not heard:
            await asyncio.sleep(0.005)
            heard = ends.heard()
    assert heard == [b"second"]
    assert refused == [errno.ETIMEDOUT]


async def test_the_end_of_the_socket_is_reported_as_the_loss_of_init(ends: Ends) -> None:
    ends.theirs.close()
    ends.sender.send_message(b"first", [0], 1, never)
    await asyncio.sleep(0)

    assert len(ends.lost) == 1


@pytest.mark.parametrize(("own", "slot"), [(256, 64), (1024, 256), (4096, 1024), (20_000, 4096), (1 << 20, 4096), (100, 64)])
def test_a_slot_may_open_a_quarter_of_what_the_agent_may(own: int, slot: int) -> None:
    assert slot_limit(own) == slot


@pytest.mark.parametrize(("own", "slots", "drains"), [(1024, 10, 48), (256, 10, 9), (1 << 20, 10, 256), (100, 50, 4)])
def test_the_limit_of_drained_pipes_leaves_descriptors_for_calls(own: int, slots: int, drains: int) -> None:
    assert max_drains(own, slots) == drains


@pytest.mark.parametrize(
    ("counts", "culprit"),
    [
        ({}, None),
        ({"0": 0, "1": 3}, None),
        ({"0": 2000, "1": 3}, "0"),
        ({"0": 600, "1": 700}, "1"),
        ({"0": 200, "1": 200}, None),
    ],
)
def test_only_a_slot_with_a_considerable_part_of_the_limit_in_flight_is_blamed(counts: dict[str, int], culprit: str | None) -> None:
    assert find_slot_to_blame(counts, 1024) == culprit

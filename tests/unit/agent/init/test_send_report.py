"""The reports of init while the kernel has no memory for them: they wait, and only the end of the agent ends the slot."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from sandbox_server.agent.init.init import Init
from sandbox_server.agent.init.reports import EXITED, REPORT


class ShortSocket(socket.socket):
    """A socket that refuses the first messages with an errno."""

    error = 0
    refusal_count = 0

    def send(self, data: bytes, flags: int = 0) -> int:  # type: ignore[override]
        if self.refusal_count:
            self.refusal_count -= 1
            raise OSError(self.error, os.strerror(self.error))
        return super().send(data, flags)


class SlotEnded(Exception):
    """Init has ended its slot."""


class InitOfTest(Init):
    """An init that has a socket and nothing else, and that outlives its slot."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def _end_slot(self) -> None:  # type: ignore[override]
        raise SlotEnded


Make = Callable[[int, int], tuple[InitOfTest, socket.socket]]


@pytest.fixture
def make_init() -> Iterator[Make]:
    """Makes an init that cannot send its first reports, and the agent's end of its socket: `make_init(error, refusal_count)`."""
    with ExitStack() as stack:

        def make(error: int, refusal_count: int) -> tuple[InitOfTest, socket.socket]:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock = stack.enter_context(ShortSocket(fileno=ours.detach()))
            sock.error, sock.refusal_count = error, refusal_count
            return InitOfTest(sock), stack.enter_context(theirs)

        yield make


@pytest.mark.parametrize("error", [errno.ENOBUFS, errno.ENOMEM])
def test_a_report_for_which_there_is_no_memory_is_sent_later(make_init: Make, error: int) -> None:
    init, agent = make_init(error, 3)

    init.send_report(EXITED, 7, 256)

    assert REPORT.unpack_from(agent.recv(4096))[:3] == (EXITED, 7, 256)


def test_the_slot_ends_if_the_agent_ends_while_a_report_waits_for_memory(make_init: Make) -> None:
    init, agent = make_init(errno.ENOBUFS, 10**9)
    agent.close()

    with pytest.raises(SlotEnded):
        init.send_report(EXITED, 7)


def test_the_slot_ends_if_the_agent_has_ended(make_init: Make) -> None:
    init, agent = make_init(0, 0)
    agent.close()

    with pytest.raises(SlotEnded):
        init.send_report(EXITED, 7)


def test_the_slot_ends_if_the_agent_has_left_a_report_unread(make_init: Make) -> None:
    init, agent = make_init(0, 0)
    init.send_report(EXITED, 7)
    agent.close()

    with pytest.raises(SlotEnded):
        init._receive_request()

"""What the agent says to an init, in order, over a socket that may be full and a system that may be short of what sending needs."""

from __future__ import annotations

import array
import asyncio
import collections
import errno
import os
import socket
from typing import Callable, Deque, NamedTuple, Sequence

from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS

QUEUE_LIMIT = 20_000
RETRY_WITHIN_S = 3.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1


class _Message(NamedTuple):
    data: bytes
    fds: list[int]
    number: int
    refused: Callable[[int], None]


class InitSender:
    """Sends messages with descriptors.

    A message that the system refuses for now (too many descriptors under way, no memory) is tried again for `RETRY_WITHIN_S`, and then is refused itself:
    what the system lacks says nothing about init. Messages without descriptors need nothing that can be lacking for long, and go ahead of it.

    Args:
        loop: the event loop.
        sock: non-blocking; stays the caller's.
        lost: called, later, when the socket is of no use any more, with why.
        in_flight_full: called whenever a message is refused because too many descriptors are under way.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, lost: Callable[[str], None], in_flight_full: Callable[[], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._lost = lost
        self._in_flight_full = in_flight_full
        self._waiting: Deque[_Message] = collections.deque()
        self._retry: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._give_up_at = 0.0
        self._closed = False

    def send(self, data: bytes, fds: Sequence[int], number: int, refused: Callable[[int], None]) -> None:
        """Send a message now or as soon as it can be.

        Args:
            data: the message.
            fds: the descriptors that go with it; they stay the caller's.
            number: of what it asks for, see `withdraw`.
            refused: called with an errno when it could not be sent.

        Raises:
            OSError: it would have to wait, and there is no descriptor left to keep its descriptors.
        """
        if not self._waiting or (self._retry is not None and not fds):
            error = self._transmit(data, fds)
            if error is None:
                return
            if error.errno not in TEMPORARY_ERRORS:
                self._loop.call_soon(self._lost, "its control socket failed: %s" % error)
                return
        else:
            error = None
        if len(self._waiting) >= QUEUE_LIMIT:
            self._loop.call_soon(self._lost, "init has stopped reading")
            return
        self._waiting.append(_Message(data, _duplicates(fds), number, refused))
        if error is not None and len(self._waiting) == 1:
            self._give_up_at = self._loop.time() + RETRY_WITHIN_S
            self._wait(error)

    def withdraw(self, number: int) -> bool:
        """Forget what has been asked under this number and has not been sent; whether there was any. Its `refused` is called."""
        for message in self._waiting:
            if message.number == number:
                first = message is self._waiting[0]
                self._waiting.remove(message)
                if first:
                    self._stop_waiting()
                    self._loop.call_soon(self._flush)
                _drop(message, errno.ETIMEDOUT)
                return True
        return False

    def close(self) -> None:
        """Nothing more is sent."""
        self._closed = True
        self._stop_waiting()
        while self._waiting:
            for fd in self._waiting.popleft().fds:
                os.close(fd)

    def _transmit(self, data: bytes, fds: Sequence[int]) -> OSError | None:
        try:
            if fds:
                self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            else:
                self._sock.send(data)
        except OSError as error:
            return error
        return None

    def _wait(self, error: OSError) -> None:
        """Go on when the socket has room again, or in a while."""
        self._stop_waiting()
        if isinstance(error, BlockingIOError):
            self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        if error.errno == errno.ETOOMANYREFS:
            self._in_flight_full()
        self._retry = self._loop.call_later(self._pause_s, self._flush)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _stop_waiting(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _flush(self) -> None:
        while self._waiting and not self._closed:
            message = self._waiting[0]
            error = self._transmit(message.data, message.fds)
            if error is not None and error.errno not in TEMPORARY_ERRORS:
                self._stop_waiting()
                self._lost("its control socket failed: %s" % error)
                return
            if error is not None and (isinstance(error, BlockingIOError) or self._loop.time() < self._give_up_at):
                self._wait(error)
                return
            self._waiting.popleft()
            self._give_up_at = self._loop.time() + RETRY_WITHIN_S
            if error is None:
                self._pause_s = _FIRST_PAUSE_S
                _close_all(message.fds)
            else:
                _drop(message, error.errno or 0)
        self._stop_waiting()


def _duplicates(fds: Sequence[int]) -> list[int]:
    own: list[int] = []
    try:
        for fd in fds:
            own.append(os.dup(fd))
    except OSError:
        _close_all(own)
        raise
    return own


def _drop(message: _Message, number: int) -> None:
    _close_all(message.fds)
    message.refused(number)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

"""Sends the agent's messages to init, in order, although the socket may be full and the kernel may be short of what sending needs."""

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
    on_unsent: Callable[[int], None]


class InitSender:
    """Sends messages with file descriptors to one init.

    If the kernel refuses a message for a temporary reason (too many descriptors in flight, no memory), the message is sent again for `RETRY_WITHIN_S`
    seconds. After that only this message fails: a shortage in the kernel is no sign that init is lost. Messages without descriptors need none of what can
    be short for long, so they are sent before messages that are waiting for a retry.

    Args:
        loop: the event loop.
        sock: the non-blocking socket. The caller closes it.
        on_lost: called with the reason, in a later turn of the event loop, when the socket cannot be used any more.
        on_in_flight_full: called whenever the kernel refuses a message because too many descriptors are in flight.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, on_lost: Callable[[str], None], on_in_flight_full: Callable[[], None]) -> None:
        self._loop = loop
        self._sock = sock
        self._on_lost = on_lost
        self._on_in_flight_full = on_in_flight_full
        self._queue: Deque[_Message] = collections.deque()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._give_up_at = 0.0
        self._is_closed = False

    def send_message(self, data: bytes, fds: Sequence[int], number: int, on_unsent: Callable[[int], None]) -> None:
        """Send a message now, or queue it until it can be sent.

        Args:
            data: the message.
            fds: the descriptors to send with it. The caller still closes its own.
            number: the spawn id, for `withdraw_message`; 0: the message cannot be withdrawn.
            on_unsent: called with an errno if the message could not be sent.

        Raises:
            OSError: the message must be queued, and the agent has no descriptors left to duplicate those of the message.
        """
        if not self._queue or (self._retry_timer is not None and not fds):
            error = self._transmit(data, fds)
            if error is None:
                return
            if error.errno not in TEMPORARY_ERRORS:
                self._loop.call_soon(self._on_lost, "its control socket failed: %s" % error)
                return
        else:
            error = None
        if len(self._queue) >= QUEUE_LIMIT:
            self._loop.call_soon(self._on_lost, "init has stopped reading")
            return
        self._queue.append(_Message(data, _duplicate(fds), number, on_unsent))
        if error is not None and len(self._queue) == 1:
            self._give_up_at = self._loop.time() + RETRY_WITHIN_S
            self._schedule_flush(error)

    def withdraw_message(self, number: int) -> bool:
        """Remove a queued message from the queue and call its `on_unsent`. Returns False if no message with this number is queued."""
        for message in self._queue:
            if message.number == number:
                first = message is self._queue[0]
                self._queue.remove(message)
                if first:
                    self._cancel_flush()
                    self._loop.call_soon(self._flush)
                _fail_message(message, errno.ETIMEDOUT)
                return True
        return False

    def close_sender(self) -> None:
        """Discard the queue. Nothing is sent after this."""
        self._is_closed = True
        self._cancel_flush()
        while self._queue:
            for fd in self._queue.popleft().fds:
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

    def _schedule_flush(self, error: OSError) -> None:
        """Send the queue once the socket has room again, or after a pause."""
        self._cancel_flush()
        if isinstance(error, BlockingIOError):
            self._loop.add_writer(self._sock.fileno(), self._flush)
            return
        if error.errno == errno.ETOOMANYREFS:
            self._on_in_flight_full()
        self._retry_timer = self._loop.call_later(self._pause_s, self._flush)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _cancel_flush(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    def _flush(self) -> None:
        while self._queue and not self._is_closed:
            message = self._queue[0]
            error = self._transmit(message.data, message.fds)
            if error is not None and error.errno not in TEMPORARY_ERRORS:
                self._cancel_flush()
                self._on_lost("its control socket failed: %s" % error)
                return
            if error is not None and (isinstance(error, BlockingIOError) or self._loop.time() < self._give_up_at):
                self._schedule_flush(error)
                return
            self._queue.popleft()
            self._give_up_at = self._loop.time() + RETRY_WITHIN_S
            if error is None:
                self._pause_s = _FIRST_PAUSE_S
                _close_all(message.fds)
            else:
                _fail_message(message, error.errno or 0)
        self._cancel_flush()


def _duplicate(fds: Sequence[int]) -> list[int]:
    own: list[int] = []
    try:
        for fd in fds:
            own.append(os.dup(fd))
    except OSError:
        _close_all(own)
        raise
    return own


def _fail_message(message: _Message, errno_number: int) -> None:
    _close_all(message.fds)
    message.on_unsent(errno_number)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)

"""The requests of the network process to the router. Each takes some milliseconds at most, and the event loop waits for it."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
from typing import Any, Mapping, Sequence

from sandbox_server.agent.network.router import MESSAGE_BYTES

_MAX_DESCRIPTORS = 4


class RouterClient:
    """One end of the socket between the network process and the router.

    Args:
        sock: the socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def receive_set_up(self) -> tuple[int, socket.socket, socket.socket]:
        """Return the network namespace of the router as a descriptor, and the sockets for questions over UDP and over TCP.

        Raises:
            OSError: the router could not be set up; the text says why.
        """
        namespace_fd, packets, connections = self._receive_answer(3)
        return namespace_fd, socket.socket(fileno=packets), socket.socket(fileno=connections)

    def make_slot_network(self, number: int) -> int:
        """See `Router.make_slot_network`."""
        return self._ask({"op": "make", "number": number}, 1)[0]

    def delete_slot_network(self, number: int) -> None:
        """See `Router.delete_slot_network`."""
        self._ask({"op": "delete", "number": number})

    def end_connections(self, number: int) -> None:
        """See `conntrack.end_connections`."""
        self._ask({"op": "end", "number": number})

    def run_rules(self, commands: str) -> None:
        """See `Router.run_rules`."""
        self._ask({"op": "rules", "rules": commands})

    def fileno(self) -> int:
        """Return the descriptor of the socket. Between requests it can be read when the router has ended."""
        return self._sock.fileno()

    def _ask(self, request: Mapping[str, Any], count: int = 0) -> Sequence[int]:
        self._sock.send(json.dumps(request).encode())
        return self._receive_answer(count)

    def _receive_answer(self, count: int) -> Sequence[int]:
        """Return the descriptors of an answer.

        Args:
            count: how many there are.

        Raises:
            OSError: the router has refused the request, or has ended, or this process cannot have so many more descriptors.
        """
        fds = array.array("i")
        data, ancillary, _, _ = self._sock.recvmsg(MESSAGE_BYTES, socket.CMSG_SPACE(_MAX_DESCRIPTORS * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError(errno.ECONNRESET, "the router of the slots has ended")
        for _, _, packed in ancillary:
            fds.frombytes(packed[: len(packed) - len(packed) % fds.itemsize])
        answer = json.loads(data)
        if not answer["ok"]:
            raise OSError(answer["errno"], answer["error"])
        if len(fds) < count:
            # The kernel leaves those out for which this process has no room.
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, "the network process has too many open files to take a network for a slot")
        return list(fds)

"""Receives the messages of the agent in an init."""

from __future__ import annotations

import _socket as socket
import os
import struct
from marshal import loads

from sandbox_server.agent.init.reports import MAX_DESCRIPTORS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Tuple


def receive_message(sock: socket.socket, most_bytes: int) -> Tuple[bytes, List[int]]:
    """Receive one message of at most so many bytes. Returns it, and the descriptors that were sent with it."""
    data, ancillary, _, _ = sock.recvmsg(most_bytes, socket.CMSG_LEN(4 * MAX_DESCRIPTORS), socket.MSG_CMSG_CLOEXEC)
    fds: List[int] = []
    for _, _, packed in ancillary:
        fds += struct.unpack("%di" % (len(packed) // 4), packed[: len(packed) // 4 * 4])
    return data, fds


def read_large_message(fd: int) -> Dict[str, Any]:
    """Return the request in a file in memory, which is too long for a message, and close the file."""
    try:
        size = os.fstat(fd).st_size
        data = b""
        while len(data) < size:
            data += os.pread(fd, size - len(data), len(data))
        request: Dict[str, Any] = loads(data)
        return request
    finally:
        os.close(fd)

"""`python AGENT connect SOCKET`: copies standard input and output to and from the agent's unix socket.

A service uses it if it can start programs in a sandbox but cannot connect to a socket there. The agent outlives the relay, so a later relay can connect to it.
A relay ends when either side closes its connection. If the service is killed, the standard input of its relays is closed, so no relay is left over.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from typing import Callable, List, NoReturn

CHUNK_BYTES = 256 << 10
CONNECT_WITHIN_S = 10.0
#: After so many seconds without taking any data, the agent counts as stuck. The relay then ends, so that it does not outlive the service.
TAKES_NOTHING_S = 30
STDIN, STDOUT = 0, 1


def main(arguments: List[str]) -> NoReturn:
    """Relay until one side closes its connection, and then end the process.

    Args:
        arguments: what follows `connect`: the path of the agent's socket.
    """
    if len(arguments) != 1:
        _end("usage: connect SOCKET")
    path = arguments[0]
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(CONNECT_WITHIN_S)
        sock.connect(path)
        sock.settimeout(None)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", TAKES_NOTHING_S, 0))
    except OSError as error:
        _end("cannot connect to the agent at %s: %s" % (path, error))
    for descriptor in (STDIN, STDOUT):
        os.set_blocking(descriptor, True)
    threading.Thread(target=_copy, args=(lambda: sock.recv(CHUNK_BYTES), _write_output), daemon=True).start()
    _copy(lambda: os.read(STDIN, CHUNK_BYTES), sock.sendall)


def _copy(read: Callable[[], bytes], write: Callable[[bytes], None]) -> NoReturn:
    """Copy one direction to its end, then end the process. All data is written before more is read, so that a slow reader slows the writer down."""
    try:
        while True:
            data = read()
            if not data:
                _end()
            write(data)
    except BlockingIOError:
        _end("the agent has taken nothing for %d s" % TAKES_NOTHING_S)
    except BrokenPipeError:
        _end()
    except OSError as error:
        _end("the connection ended: %s" % error)


def _write_output(data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(STDOUT, rest) :]


def _end(problem: str = "") -> NoReturn:
    """End the process at once, even while its other thread waits for data."""
    if problem:
        os.write(2, (problem + "\n").encode(errors="replace"))
    os._exit(1 if problem else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

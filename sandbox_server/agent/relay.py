"""`python AGENT connect SOCKET`: copies standard input and output to and from the agent's unix socket.

For a service that can start programs in a sandbox but cannot reach a socket there. The agent outlives the relay: the next one finds it again.
A relay ends when either side does. So none is left when the service is killed, which closes the relay's standard input.
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
#: An agent that takes nothing for so long is stuck, and the relay must not wait for it when the service is gone, in seconds.
TAKES_NOTHING_S = 30
STDIN, STDOUT = 0, 1


def main(arguments: List[str]) -> NoReturn:
    """Relay until one side ends.

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
    """Copy one direction, then end the relay. What was read is written before more is read: a slow reader slows the writer down."""
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
    """End the process at once, whatever its other thread waits for."""
    if problem:
        os.write(2, (problem + "\n").encode(errors="replace"))
    os._exit(1 if problem else 0)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Opens the pseudo-terminal of a process of a slot, in the forked child of init that is about to execute the program of that process.

The child has the user of the slot already, so the terminal belongs to that user, and is one of the slot's own /dev/pts where the slot has one. The program
gets the terminal itself. The other end, the master, goes to the agent alone: the child sends it over a socket, and closes its own copy before it executes the
program. No process of the slot can take it from the child, because the child is not dumpable until then.
"""

from __future__ import annotations

import _socket as socket
import fcntl
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict

#: What the child sends together with the master.
OPENED = b"opened"
_TIOCSCTTY = 0x540E


def open_streams(socket_fd: int) -> Dict[str, int]:
    """Open a pseudo-terminal, make it the controlling terminal of this process, and pass its master to the agent.

    Waits until the agent has set up the terminal, so that the program finds the size of the window from its start on.

    Args:
        socket_fd: the socket to the agent. This function closes it.

    Returns:
        The terminal as standard input and output, as `Init` names the descriptors of a process.

    Raises:
        OSError: there is no pseudo-terminal, or the agent does not take it.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, socket_fd)
    master, terminal = os.openpty()
    sock.sendmsg([OPENED], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", master))])
    os.close(master)
    if not sock.recv(1):
        raise ConnectionAbortedError(103, "the agent does not take the terminal")
    sock.close()
    fcntl.ioctl(terminal, _TIOCSCTTY, 0)
    return {"in": terminal, "out": terminal}

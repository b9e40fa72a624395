"""`python AGENT spawn FD`: a process that has imported the agent and forks one agent for each request of the service.

It knows no token and no configuration: an agent reads its own from its standard input after the fork. Its parent is the parent of this process, which therefore
learns how it ends. All agents that it forks have one address layout.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import struct
import sys
import traceback
from typing import NoReturn, Sequence

from sandbox_server.agent.__main__ import main as run_agent
from sandbox_server.agent.template.system_calls import fork_sibling

#: The process id of the new agent, or an errno as a negative number. The first message has the id of this process and says that it can fork.
ANSWER = struct.Struct("<i")
REQUEST = b"fork"
_AGENT_STREAMS = 2  # The standard input of the agent, and its standard output and error.


def main(arguments: Sequence[str]) -> NoReturn:
    """Fork an agent for each message, until the service closes the socket.

    Args:
        arguments: the descriptor of a socket, on which each message of the service has the two streams of the agent.
    """
    sock = socket.socket(fileno=int(arguments[0]))
    sock.set_inheritable(False)
    gc.collect()
    gc.freeze()  # The collector then writes nothing to the memory that all agents share.
    sock.send(ANSWER.pack(os.getpid()))
    while True:
        data, ancillary, _, _ = sock.recvmsg(len(REQUEST), socket.CMSG_SPACE(4 * _AGENT_STREAMS), socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        streams = [fd for _, _, packed in ancillary for fd in struct.unpack("%di" % (len(packed) // 4), packed)]
        if data != REQUEST or len(streams) != _AGENT_STREAMS:
            os._exit(1)
        try:
            pid = fork_sibling(0)
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            sock.close()
            _become_agent(*streams)
        for fd in streams:
            os.close(fd)
        sock.send(ANSWER.pack(pid))


def _become_agent(stdin: int, output: int) -> NoReturn:
    """Run an agent in this process, which has just been forked."""
    code = 1
    try:
        os.setsid()
        for fd, target in ((stdin, 0), (output, 1), (output, 2)):
            os.dup2(fd, target)
        os.close(stdin)
        os.close(output)
        code = run_agent()
    except BaseException:  # The forked process must never return into the loop of its parent, and its log must say why it ended.
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stderr.flush()
        os._exit(code)

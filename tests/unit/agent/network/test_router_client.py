"""What the network process makes of the answers of the router."""

from __future__ import annotations

import errno
import socket

import pytest

from sandbox_server.agent.network.router_client import RouterClient


def test_an_answer_without_its_descriptor_says_that_too_many_files_are_open() -> None:
    own, routers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with own, routers:
        routers.send(b'{"ok": true}')  # what is received of an answer whose descriptor the kernel has left out
        with pytest.raises(OSError, match="too many open files") as raised:
            RouterClient(own).make_slot_network(3)
        assert raised.value.errno == errno.EMFILE

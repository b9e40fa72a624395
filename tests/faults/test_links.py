"""A connection of another process can be cut from outside."""

from __future__ import annotations

import socket
import subprocess
import sys

from tests.faults import links

CONNECTS = """
import socket, sys
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
other = socket.socket(socket.AF_UNIX)
other.connect(sys.argv[2])
print(link.recv(1) == b"", flush=True)
print(other.recv(1) == b"x", flush=True)
"""


def listener(path):
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server


def test_what_leads_below_the_folder_is_cut_and_the_rest_goes_on(tmp_path):
    below, other = tmp_path / "state", tmp_path / "other"
    below.mkdir()
    with listener(below / "s") as inside, listener(other) as outside:
        command = [sys.executable, "-c", CONNECTS, str(below / "s"), str(other)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            here, there = inside.accept()[0], outside.accept()[0]

            assert links.cut(process.pid, 1.0, below) == 1

            assert process.stdout.readline() == "True\n"
            there.sendall(b"x")
            assert process.stdout.readline() == "True\n"
            here.close()
            there.close()
    assert links.cut(process.pid, 1.0, below) == 0

"""A machine and an internet for tests of the network, each in network namespaces of the test. Needs root; nothing of the real machine is changed."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import outside_hosts

PUBLIC, OTHER, NAME_SERVER = "198.51.100.7", "198.51.100.8", "198.51.100.53"
#: The addresses of the machine: one that the internet knows, and one of a bridge of the machine itself.
MACHINE, BRIDGE = "203.0.113.9", "203.0.113.130"
ROUTER = "203.0.113.1"
PORT, HOLD_PORT = outside_hosts.PORT, outside_hosts.HOLD_PORT
#: The port of what listens on the machine itself, on all of its addresses.
MACHINE_PORT = 9000
_MACHINE_SERVER = f"""
import socket
server = socket.create_server(("0.0.0.0", {MACHINE_PORT}), backlog=100)
print("serving", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(b"the machine\\n")
    connection.close()
"""


@dataclass(frozen=True, kw_only=True)
class Internet:
    """A machine in namespaces of its own, and what it can reach.

    Attributes:
        machine_pid: a process in the namespaces of the machine.
        outside: the program that answers for all hosts outside.
    """

    machine_pid: int
    outside: subprocess.Popen[str]

    def prefix(self, uid: int, gid: int) -> list[str]:
        """The command that starts another one on the machine, as a user of it."""
        enter = ["nsenter", f"--target={self.machine_pid}", "--net", "--mount"]
        return enter if uid == 0 else [*enter, "setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups"]

    def seen(self) -> set[str]:
        """What has been reached outside so far, such as `tcp 198.51.100.7`."""
        assert self.outside.stdin is not None
        assert self.outside.stdout is not None
        self.outside.stdin.write("seen\n")
        self.outside.stdin.flush()
        return set(json.loads(self.outside.stdout.readline()))

    def add_machine_address(self, address: str) -> None:
        """Give the machine another address, which then is one of its own instead of one outside."""
        _ip(f"addr add {address}/32 dev lo", self.machine_pid)

    def add_local_route(self, network: str) -> None:
        """Let the machine take packets for a network as its own, without an address in it."""
        _ip(f"route add local {network} dev lo", self.machine_pid)

    def bound_udp_ports(self) -> set[int]:
        """The ports on which something on the machine receives packets of UDP."""
        lines = Path(f"/proc/{self.machine_pid}/net/udp").read_text().splitlines()[1:]
        return {int(line.split()[1].split(":")[1], 16) for line in lines}

    def held_connections(self) -> int:
        """How many connections to `HOLD_PORT` belong to a process on the machine."""
        fields = [line.split() for line in Path(f"/proc/{self.machine_pid}/net/tcp").read_text().splitlines()[1:]]
        return sum(each[2].endswith(f":{HOLD_PORT:04X}") and each[9] != "0" for each in fields)


def _ip(command: str, pid: int) -> None:
    subprocess.run(["nsenter", f"--target={pid}", "--net", "ip", *command.split()], check=True, capture_output=True)


@contextlib.contextmanager
def _process(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process that has printed a line, which says that it is ready."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline(), f"{command[:3]} has ended"
        yield process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def made_internet() -> Iterator[Internet]:
    """Make the namespaces and start the hosts; end them afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="internet-")))
        (folder / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\n")
        (folder / "resolv.conf").chmod(0o644)
        # Its device for the uplink is open to every user, as on most machines.
        mounts = f"mount --bind {folder}/resolv.conf /etc/resolv.conf && mkdir -p /dev/net && mount -t tmpfs -o mode=755 tmpfs /dev/net"
        mounts += " && mknod -m 666 /dev/net/tun c 10 200 && chmod 666 /dev/net/tun"
        machine = stack.enter_context(_process("unshare", "--net", "--mount", "sh", "-ec", f"{mounts} && echo ready && exec cat"))
        outside = stack.enter_context(_process("unshare", "--net", "sh", "-c", "echo ready; exec cat"))
        _ip(f"link add uplink0 type veth peer name inside0 netns {outside.pid}", machine.pid)
        for command in (
            "link set lo up", "link set uplink0 up", f"addr add {MACHINE}/25 dev uplink0", f"addr add {BRIDGE}/25 dev lo", f"route add default via {ROUTER}",
        ):  # fmt: skip
            _ip(command, machine.pid)
        # All addresses are those of the outside: it answers whatever the machine sends there.
        for command in ("link set lo up", "link set inside0 up", f"addr add {ROUTER}/25 dev inside0", "route add local 0.0.0.0/0 dev lo"):
            _ip(command, outside.pid)
        python, hosts = os.path.realpath(sys.executable), str(Path(outside_hosts.__file__))
        served = stack.enter_context(_process("nsenter", f"--target={outside.pid}", "--net", python, "-I", hosts))
        stack.enter_context(_process("nsenter", f"--target={machine.pid}", "--net", python, "-I", "-c", _MACHINE_SERVER))
        yield Internet(machine_pid=machine.pid, outside=served)

"""The attacks that depend on how the service reaches its agents, over TLS and over stdin and stdout; the others run once, over the unix socket."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sandbox_server.agent import wire
from tests.faults import links
from tests.hostile.attacks import ATTACKS, Attack
from tests.hostile.attempt import attempt
from tests.hostile.hostile_harness import HostileHarness, open_hostile_harness

USER = "root" if os.geteuid() == 0 else "user"
# In the mode `uid` every slot shares the network, so that each can connect to the TLS port of its agent. Only root has this mode.
MODES = [("bwrap", "tls"), ("bwrap", "stdio"), *([("uid", "tls")] if USER == "root" else [])]
# What a transport adds to the machine: a listening port, a certificate with its key, a relay process, and other descriptors of the agent.
DEPENDENT = {"service-secrets", "signal-neighbour", "read-neighbour-environment", "attach-to-init", "reach-network", "forge-verdict"}
IDLE_CONNECTIONS = 200

# Connects to the agent's TLS port as anything in the sandbox could, without the agent's token, and then keeps connections open.
INTRUDER = """
import socket, ssl, sys, time
port, count = int(sys.argv[1]), int(sys.argv[2])
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
received = 0
for first in map(bytes.fromhex, sys.argv[3:]):
    with context.wrap_socket(socket.create_connection(("127.0.0.1", port), timeout=20)) as connection:
        try:
            connection.sendall(first)
            while data := connection.recv(65536): received += len(data)
        except OSError: pass
connections = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(count)]
print(f"received {received} bytes, holds {len(connections)} connections", flush=True)
open("connected", "w").close()
time.sleep(600)
"""
FIRST_BYTES = [
    wire.frame(wire.HELLO, 0, b'{"v": 1, "token": "guessed"}'),
    wire.frame(wire.OPEN, 1, b'{"op": "watch"}'),
    b"GET /v1/leases HTTP/1.1\r\nHost: localhost\r\n\r\n",
]
START_INTRUDER = (
    "cat > intruder.py; /usr/bin/python3 -I intruder.py {arguments} > log 2>&1 & until [ -e connected ]; do kill -0 $! || break; sleep 0.05; done; cat log"
)


@pytest.fixture(scope="module", params=MODES, ids="-".join)
def running_harness(request: pytest.FixtureRequest) -> Iterator[HostileHarness]:
    """A service in one mode that reaches its agents over one transport."""
    mode, transport = request.param
    with open_hostile_harness(mode, USER, transport) as harness:
        yield harness


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.key in DEPENDENT], ids=lambda attack: attack.key)
def test_an_attack_that_depends_on_the_transport_is_held_off(harness: HostileHarness, attack: Attack) -> None:
    attempt(harness, attack)


def test_a_slot_at_the_port_of_its_agent_gets_nothing_and_keeps_the_service_from_nothing(harness: HostileHarness) -> None:
    """The service reaches the agent again although the slot holds more connections than the agent accepts without a token."""
    addresses = [json.loads(path.read_text())["address"] for path in Path(harness.state_dir).glob("sandboxes/*/handle.json")]
    if not addresses[0].startswith("tls:"):
        assert [address for address in addresses if address.startswith("tls:")] == [], "no other transport listens on a port"
        return
    intruder, neighbour = harness.acquire(), harness.acquire()
    arguments = " ".join([addresses[0].rpartition(":")[2], str(IDLE_CONNECTIONS), *(first.hex() for first in FIRST_BYTES)])

    log = harness.call(intruder, "bash", {"command": START_INTRUDER.format(arguments=arguments), "stdin": INTRUDER}, timeout_s=60)

    assert log["output"] == f"received 0 bytes, holds {IDLE_CONNECTIONS} connections\n"
    assert harness.bash(neighbour, "echo served")["output"] == "served\n"
    if links.permission_problem() is None:
        assert links.cut(harness.pid, 1.0, Path(harness.state_dir)) == 1
        assert harness.bash(neighbour, "echo served again")["output"] == "served again\n"
    harness.still_sound()

"""The network `internet`: what slots reach through it, and what they cannot reach, against hosts in namespaces of the test."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sandbox_server.agent.network.rules import MAX_PACKETS_S
from sandbox_server.link import AgentRefused
from tests.integration.agent.agent_harness import AgentHarness, AgentProcess, agent_process, connected, wait_for_ends
from tests.support.internet import BRIDGE, HOLD_PORT, MACHINE, MACHINE_PORT, NAME_SERVER, OTHER, PORT, PUBLIC, Internet, made_internet
from tests.support.users import ME, Runner, ordinary_user

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the namespaces of the hosts"),
    pytest.mark.skipif(shutil.which("pasta") is None, reason="pasta is not installed"),
]

#: Tries addresses at the same time, and reports, as a JSON list, what each of them has answered, or the name of its error.
ATTEMPTS = """
import concurrent.futures, errno, json, socket, sys
def attempt(kind, address, port):
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return (tcp if kind == "tcp" else udp)(family, address, port)
    except socket.timeout:
        return "timeout"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
def tcp(family, address, port):
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.settimeout(6)
        sock.connect((address, port))
        return sock.recv(100).decode().strip()
def udp(family, address, port):
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(1)
        sock.connect((address, port))
        sock.send(b"x")
        return sock.recv(100).decode().strip()
tries = json.loads(sys.argv[1])
with concurrent.futures.ThreadPoolExecutor(len(tries)) as threads:
    print(json.dumps(list(threads.map(attempt, *zip(*tries)))))
"""
#: Public addresses that become addresses of the machine, one for each test.
FREE_ADDRESSES = (f"198.51.100.{number}" for number in range(70, 80))
#: One address of each network that is not public, and of the machine.
FORBIDDEN = (
    "10.1.2.3", "172.16.0.1", "172.31.255.254", "192.168.1.1", "100.64.0.1", "100.100.100.200", "169.254.169.254", "168.63.129.16", "192.0.0.192", "0.1.2.3",
    "198.18.0.2", "198.18.0.3", "198.18.1.200", "198.19.255.1", "192.88.99.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", MACHINE, BRIDGE,
)  # fmt: skip
#: The same as IPv6 addresses: mapped, translated (NAT64, also its local form), by 6to4 and Teredo, and those that IPv6 has of its own.
FORBIDDEN_6 = (
    "::ffff:10.1.2.3", "::ffff:169.254.169.254", f"::ffff:{MACHINE}", "::10.1.2.3", "64:ff9b::a01:203", "64:ff9b::a9fe:a9fe", "64:ff9b:1::a01:203",
    "2002:a01:203::1", "2001:0:a01:203::1", "fd00::2", "fc00::1", "fe80::1", "ff02::1", "2001:db8::1", "2606:4700::1111",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerInside(Runner):
    """A user on the machine of the test, which the command that starts a process changes to."""

    @property
    def popen_options(self) -> dict[str, Any]:
        return {}


def inside(runner: Runner) -> Runner:
    return RunnerInside(**{field.name: getattr(runner, field.name) for field in dataclasses.fields(runner)})


@pytest.fixture(scope="module")
def internet() -> Iterator[Internet]:
    with made_internet() as made:
        yield made


def start_agent(internet: Internet, user: str, **settings: Any) -> contextlib.AbstractContextManager[AgentProcess]:
    runner = ME if user == "root" else ordinary_user()
    return agent_process(inside(runner), "bwrap", prefix=internet.prefix(runner.uid, runner.gid), internet=True, **settings)


@pytest.fixture(scope="module", params=["root", "user"])
def agent(internet: Internet, request: pytest.FixtureRequest) -> Iterator[AgentProcess]:
    with start_agent(internet, request.param) as started:
        yield started


def part_of(agent: AgentProcess, name: str) -> psutil.Process:
    """The process of an agent whose name begins so. The name of the uplink begins with `pasta` or `passt`."""
    (found,) = (each for each in psutil.Process(agent.process.pid).children(recursive=True) if each.name().startswith(name))
    return found


@pytest.fixture
async def slots(agent: AgentProcess) -> AsyncIterator[AgentHarness]:
    async with connected(agent) as harness:
        yield harness


async def attempt_all(slots: AgentHarness, tries: list[tuple[str, str, int]], slot: str = "0") -> list[str]:
    """Try addresses in a slot, all at the same time. Returns what each of them has answered."""
    env = {"CODE": ATTEMPTS, "TRIES": json.dumps(tries)}
    answer = await slots.call("bash", slot, args={"command": 'python3 -c "$CODE" "$TRIES"', "env": env})
    assert answer.code == 0, answer.text
    answers: list[str] = json.loads(answer.text)
    return answers


async def attempt(slots: AgentHarness, tries: list[tuple[str, str, int]], slot: str = "0") -> dict[str, str]:
    """The same by kind and address, of addresses that are tried at one port each."""
    answers = await attempt_all(slots, tries, slot)
    return {f"{kind} {address}": answer for (kind, address, _), answer in zip(tries, answers, strict=True)}


async def resolve(slots: AgentHarness, name: str, slot: str = "0") -> list[str]:
    answer = await slots.bash(f"getent ahostsv4 {name} | cut -d' ' -f1 | sort -u", slot)
    return answer.text.split()


async def test_slots_reach_public_hosts_by_address_and_name_over_tcp_and_udp(slots: AgentHarness, internet: Internet) -> None:
    assert await attempt(slots, [("tcp", PUBLIC, PORT), ("udp", PUBLIC, PORT)]) == {f"tcp {PUBLIC}": f"tcp {PUBLIC}", f"udp {PUBLIC}": f"udp {PUBLIC}"}
    assert await resolve(slots, "www.public.test") == [PUBLIC]
    answer = await slots.bash(f"exec 3<>/dev/tcp/public.test/{PORT} && cat <&3")
    assert answer.text == f"tcp {PUBLIC}\n"
    assert f"tcp {PUBLIC}" in internet.seen()


async def test_nothing_private_and_nothing_of_the_machine_is_reached_in_any_form(slots: AgentHarness, internet: Internet) -> None:
    before = internet.seen()
    tries = [(kind, address, PORT) for address in (*FORBIDDEN, *FORBIDDEN_6) for kind in ("tcp", "udp")]
    tries += [("tcp", address, MACHINE_PORT) for address in (MACHINE, BRIDGE, "127.0.0.1", "::1", "198.18.0.1", "198.18.0.3")]
    found = zip(tries, await attempt_all(slots, tries), strict=True)
    assert [(tried, answer) for tried, answer in found if not answer.startswith(("E", "timeout"))] == []
    assert internet.seen() == before


async def test_an_address_that_the_machine_gets_later_is_closed_at_once(slots: AgentHarness, internet: Internet) -> None:
    address = next(FREE_ADDRESSES)
    assert (await attempt(slots, [("udp", address, PORT)]))[f"udp {address}"] == f"udp {address}"
    internet.add_machine_address(address)
    for _ in range(100):
        if (await attempt(slots, [("tcp", address, MACHINE_PORT)]))[f"tcp {address}"] == "EHOSTUNREACH":
            break
    assert (await attempt(slots, [("tcp", address, MACHINE_PORT)]))[f"tcp {address}"] == "EHOSTUNREACH"


async def test_a_local_route_of_the_machine_is_closed_as_its_addresses_are(slots: AgentHarness, internet: Internet) -> None:
    address = next(FREE_ADDRESSES)
    internet.add_local_route(f"{address}/32")
    found: dict[str, str] = {}
    for _ in range(100):
        found = await attempt(slots, [("tcp", address, MACHINE_PORT)])
        if found != {f"tcp {address}": "the machine"}:
            break
    assert found == {f"tcp {address}": "EHOSTUNREACH"}


async def test_the_source_port_of_a_packet_of_a_slot_takes_no_such_port_of_the_machine(slots: AgentHarness, internet: Internet) -> None:
    code = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('', 45678)); s.settimeout(9)\n"
    code += f"s.connect(('{PUBLIC}', {PORT})); s.send(b'x'); s.recv(9)"
    answer = await slots.call("bash", args={"command": 'python3 -c "$CODE"', "env": {"CODE": code}})
    assert answer.code == 0, answer.text
    ports = internet.bound_udp_ports()
    assert 45678 not in ports
    assert any(port >= 61000 for port in ports)


async def test_the_uplink_keeps_no_connection_of_a_slot_that_has_ended(slots: AgentHarness, internet: Internet) -> None:
    each = 60
    code = f"""
import socket, struct, time
def connect():
    sock = socket.create_connection(("{PUBLIC}", {HOLD_PORT}), 20)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return sock
for option, value in ((socket.IP_TTL, 1), (socket.IP_OPTIONS, bytes([7, 7, 4, 0, 0, 0, 0, 0]))):
    for _ in range({each}):
        sock = connect()
        sock.setsockopt(socket.IPPROTO_IP, option, value)  # so that the uplink might not see the reset that follows
        sock.close()
    print("closed", option)
kept = [connect() for _ in range({each})]
for sock in kept:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))  # The host does not end its side when the slot does.
open("kept", "w")
time.sleep(1000)
"""
    await slots.call("bash", args={"command": 'python3 -c "$CODE" >out 2>&1 &', "env": {"CODE": code}})
    await slots.until("test -e kept || grep Error out")
    assert "Error" not in (await slots.bash("cat out")).text
    for _ in range(100):
        if internet.held_connections() <= 2 * each:
            break
        await asyncio.sleep(0.1)
    # Packets with options go nowhere, so the kernel counts those connections for the slot as long as the uplink has them.
    assert each <= internet.held_connections() <= 2 * each
    await slots.reset()
    for _ in range(100):
        if internet.held_connections() == 0:
            break
        await asyncio.sleep(0.1)
    assert internet.held_connections() == 0
    assert (await attempt(slots, [("tcp", PUBLIC, PORT)]))[f"tcp {PUBLIC}"] == f"tcp {PUBLIC}"


async def test_a_slot_sends_no_more_packets_than_its_share(agent: AgentProcess, slots: AgentHarness) -> None:
    counters = Path(f"/proc/{part_of(agent, 'slot-router').pid}/net/dev")

    def sent() -> int:
        (line,) = (line for line in counters.read_text().splitlines() if line.strip().startswith("uplink:"))
        return sum(int(line.split(":")[1].split()[at]) for at in (9, 11))  # those that its queue has dropped as well

    code = f"import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); [s.sendto(b'x', ('{PUBLIC}', 9)) for _ in range(60000)]"
    before, began_s = sent(), time.monotonic()
    answer = await slots.call("bash", args={"command": 'python3 -c "$CODE"', "env": {"CODE": code}})
    assert answer.code == 0, answer.text
    assert sent() - before < MAX_PACKETS_S * (time.monotonic() - began_s + 1) + 1000


async def test_names_never_lead_to_private_addresses(slots: AgentHarness) -> None:
    assert await resolve(slots, "rebinding.test") == []
    assert await resolve(slots, "mixed.test") == [PUBLIC]
    assert await resolve(slots, "nothing.test") == []


async def test_slots_share_no_loopback_no_abstract_sockets_and_no_addresses(slots: AgentHarness) -> None:
    serve = (
        "import socket, threading\n"
        "for family, address in ((socket.AF_INET, ('0.0.0.0', 8765)), (socket.AF_UNIX, '\\0shared')):\n"
        "    server = socket.socket(family); server.bind(address); server.listen()\n"
        "    threading.Thread(target=lambda server=server: [server.accept()[0].send(b'slot') for _ in range(9)]).start()\n"
        "open('/workspace/serving', 'w')\n"
    )
    await slots.call("bash", "0", args={"command": 'python3 -c "$CODE" >/dev/null 2>&1 &', "env": {"CODE": serve}})
    await slots.until("test -e /workspace/serving")
    own = (await slots.bash("hostname -I 2>/dev/null || awk '/32 host/ {print f} {f=$2}' /proc/net/fib_trie | grep -m1 '^198'")).text.split()[0]
    assert (await attempt(slots, [("tcp", "127.0.0.1", 8765)]))["tcp 127.0.0.1"] == "slot"
    assert await attempt(slots, [("tcp", "127.0.0.1", 8765), ("tcp", own, 8765)], "1") == {"tcp 127.0.0.1": "ECONNREFUSED", f"tcp {own}": "EHOSTUNREACH"}
    abstract = "python3 -c \"import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\\\0shared')\" 2>&1 | tail -1"
    assert "refused" in (await slots.bash(abstract, "1")).text
    await slots.reset("0")


async def test_slots_have_no_raw_sockets_and_cannot_change_their_network(slots: AgentHarness) -> None:
    code = (
        "import errno, socket\n"
        "for family, kind, protocol in ((socket.AF_INET, socket.SOCK_RAW, 1), (socket.AF_INET, socket.SOCK_DGRAM, 1), (17, socket.SOCK_RAW, 0)):\n"
        "    try:\n"
        "        print(socket.socket(family, kind, protocol))\n"
        "    except OSError as error:\n"
        "        print(errno.errorcode[error.errno])\n"
    )
    answer = await slots.call("bash", args={"command": 'python3 -c "$CODE"', "env": {"CODE": code}})
    assert set(answer.text.split()) <= {"EPERM", "EACCES", "EAFNOSUPPORT"}, answer.text
    changes = "for change in 'link set eth0 down' 'addr add 203.0.113.7/32 dev eth0' 'route add 10.0.0.0/8 via 198.18.0.1'; do ip $change && echo changed; done"
    assert "changed" not in (await slots.bash(changes)).text
    assert "changed" not in (await slots.bash("echo 1 > /proc/sys/net/ipv4/ip_forward && echo changed")).text


async def test_a_lease_reaches_only_its_allow_hosts(slots: AgentHarness) -> None:
    await slots.reset()
    await slots.ask("narrow", network=True, cache=None, allow_hosts=["*.public.test", f"{OTHER}/32"])
    tries = [("tcp", PUBLIC, PORT), ("tcp", OTHER, PORT), ("tcp", NAME_SERVER, PORT)]
    refused = {f"tcp {PUBLIC}": "EHOSTUNREACH", f"tcp {NAME_SERVER}": "EHOSTUNREACH"}
    assert await attempt(slots, tries) == {**refused, f"tcp {OTHER}": f"tcp {OTHER}"}
    assert [await resolve(slots, name) for name in ("public.test", "other.test", "www.public.test")] == [[], [], [PUBLIC]]
    assert (await attempt(slots, tries))[f"tcp {PUBLIC}"] == f"tcp {PUBLIC}"
    # A restart of the slot for the same lease keeps the limit, and forgets the answers; the next lease has neither.
    await slots.bash("touch kept")
    await slots.ask("narrow", network=True, cache=None, read_only=["kept"])
    assert await attempt(slots, tries) == {**refused, f"tcp {OTHER}": f"tcp {OTHER}"}
    with pytest.raises(AgentRefused, match="cannot be changed"):
        await slots.ask("narrow", network=True, cache=None, allow_hosts=["other.test"])
    await slots.reset()
    assert (await attempt(slots, tries))[f"tcp {PUBLIC}"] == f"tcp {PUBLIC}"


async def test_a_slot_that_opens_many_addresses_keeps_no_other_waiting_and_ends_clean(agent: AgentProcess, slots: AgentHarness) -> None:
    await slots.reset()
    await slots.ask("narrow", network=True, cache=None, allow_hosts=["*.many.test"])
    router = part_of(agent, "slot-router")
    used = sum(router.cpu_times()[:2])
    asked = "for _ in 1 2; do for i in $(seq 0 59); do getent ahostsv4 $i.many.test | cut -d' ' -f1 | sort -u | wc -l; done; done"
    found = [int(line) for line in (await slots.bash(asked)).text.split()]
    assert len(found) == 120
    assert all(20 <= count <= 30 for count in found), found  # as many as fit into an answer
    used = sum(router.cpu_times()[:2]) - used
    # Each change of the rules takes some milliseconds, whatever is open already. A name that is open is not opened again.
    assert used < 60 * 0.03, used
    await slots.reset()


async def test_a_lease_without_network_has_its_loopback_alone(slots: AgentHarness) -> None:
    await slots.reset(network=False)
    assert (await attempt(slots, [("tcp", PUBLIC, PORT)]))[f"tcp {PUBLIC}"] == "ENETUNREACH"
    assert (await slots.bash("grep -c : /proc/net/dev")).text == "1\n"
    await slots.reset()


async def test_a_pool_opens_private_networks_and_limits_hosts(internet: Internet) -> None:
    with start_agent(internet, "root", allow_private=["10.9.8.0/24", f"{BRIDGE}/32"], allow_hosts=["index.test", "10.9.8.0/28", f"{BRIDGE}/32"]) as process:
        async with connected(process) as slots:
            assert await resolve(slots, "index.test") == ["10.9.8.7"]
            tries = [("tcp", address, PORT) for address in ("10.9.8.7", "10.9.8.9", "10.9.8.200", "10.1.2.3", PUBLIC)]
            refused = {f"tcp {address}": "EHOSTUNREACH" for address in ("10.9.8.200", "10.1.2.3", PUBLIC)}
            assert await attempt(slots, tries) == {**refused, "tcp 10.9.8.7": "tcp 10.9.8.7", "tcp 10.9.8.9": "tcp 10.9.8.9"}
            assert await attempt(slots, [("tcp", BRIDGE, MACHINE_PORT)]) == {f"tcp {BRIDGE}": "the machine"}
            with pytest.raises(AgentRefused, match="may only narrow"):
                await slots.ask("narrow", network=True, cache=None, allow_hosts=["public.test"])


@pytest.mark.parametrize("ends", ["killed", "told"])
@pytest.mark.parametrize("user", ["root", "user"])
async def test_nothing_of_the_network_outlives_the_agent(internet: Internet, user: str, ends: str) -> None:
    with start_agent(internet, user) as process:
        async with connected(process) as slots:
            await slots.bash("sleep 1000 >/dev/null 2>&1 &")
        processes = psutil.Process(process.process.pid).children(recursive=True)
        assert {"slot-network", "slot-router"} <= {each.name() for each in processes}
        assert any(each.name().startswith(("pasta", "passt")) for each in processes)
        namespaces = {os.readlink(f"/proc/{each.pid}/ns/net") for each in processes} - {os.readlink(f"/proc/{internet.machine_pid}/ns/net")}
        assert len(namespaces) >= 2
        process.process.send_signal(signal.SIGKILL if ends == "killed" else signal.SIGTERM)
        process.process.wait(30)
        assert await wait_for_ends(processes) == []
        left = {os.readlink(path) for path in Path("/proc").glob("[0-9]*/ns/net") if os.access(path, os.R_OK)}
        assert not namespaces & left


async def test_the_uplink_is_started_again_when_it_has_ended(internet: Internet) -> None:
    with start_agent(internet, "root") as process:
        async with connected(process) as slots:
            part_of(process, "pas").kill()
            await slots.until(f"(exec 3<>/dev/tcp/{PUBLIC}/{PORT} && grep -q tcp <&3) 2>/dev/null")


async def test_without_its_router_the_network_process_ends_at_once(internet: Internet) -> None:
    with start_agent(internet, "root") as process:
        async with connected(process) as slots:
            await slots.bash("true")
            part_of(process, "slot-router").kill()
            assert await asyncio.to_thread(process.process.wait, 60) is not None
        assert "the router of the slots has ended" in (process.folder / "log").read_text()


async def test_without_pasta_the_agent_says_what_is_missing(internet: Internet, tmp_path: Path) -> None:
    for name in ("bwrap", "bash", "nsenter"):
        path = shutil.which(name)
        assert path is not None
        (tmp_path / name).symlink_to(path)
    prefix = [*internet.prefix(0, 0), "env", f"PATH={tmp_path}"]
    with agent_process(inside(ME), "auto", prefix=prefix, internet=True) as process, pytest.raises(AssertionError, match="package passt"):
        async with connected(process):
            pass

"""What is outside of the machine in tests of the network: hosts with public and private addresses, and a name server. It runs in a network namespace of a test.

Every address of the namespace belongs to it, so whatever a filter lets pass is answered, and recorded. The program prints one line when it serves, and answers
the line `seen` on its standard input with one line: the addresses that anything has reached so far, as a JSON list of texts such as `tcp 198.51.100.7`.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys

PORT = 8000
#: Connections to this port stay open for as long as the other side keeps them, and longer.
HOLD_PORT = 7000
DNS_PORT = 53
#: What the name server says. A name that is not here does not exist.
NAMES = {
    "public.test": ["198.51.100.7"],
    "www.public.test": ["198.51.100.7"],
    "other.test": ["198.51.100.8"],
    "rebinding.test": ["10.1.2.3", "169.254.169.254", "127.0.0.1", "203.0.113.9"],
    "mixed.test": ["10.1.2.3", "198.51.100.7"],
    "index.test": ["10.9.8.7"],
}
#: Every name below this one, which begins with a number, has this many addresses of its own.
MANY, MANY_ADDRESSES = "many.test", 120
_IP_PKTINFO = 8


def answer_question(data: bytes) -> bytes:
    """Answer a question for IPv4 addresses. The answer names an alias first, as those of many hosts do."""
    labels, at = [], 12
    while data[at]:
        labels.append(data[at + 1 : at + 1 + data[at]].decode())
        at += 1 + data[at]
    asked, addresses = data[12 : at + 5], NAMES.get(".".join(labels))
    if ".".join(labels[1:]) == MANY:
        addresses = [f"203.0.{114 + int(labels[0])}.{number}" for number in range(1, MANY_ADDRESSES + 1)]
    (kind,) = struct.unpack_from("!H", data, at + 1)
    if addresses is None or kind != 1:
        return data[:2] + struct.pack("!HHHHH", 0x8180 if addresses else 0x8183, 1, 0, 0, 0) + asked
    records = [b"\xc0\x0c" + struct.pack("!HHIH", 5, 1, 30, 8) + b"\x05alias\xc0\x0c"]
    records += [b"\x05alias\xc0\x0c" + struct.pack("!HHIH", 1, 1, 30, 4) + socket.inet_aton(address) for address in addresses]
    return data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(records), 0, 0) + asked + b"".join(records)


def _receive(sock: socket.socket) -> tuple[bytes, str, tuple[str, int]]:
    data, ancillary, _, sender = sock.recvmsg(2000, 100)
    packed = ancillary[0][2]
    return data, socket.inet_ntoa(packed[8:12]), sender


def _reply(sock: socket.socket, data: bytes, own: str, to: tuple[str, int]) -> None:
    info = struct.pack("@i4s4s", 0, socket.inet_aton(own), b"\0" * 4)
    sock.sendmsg([data], [(socket.IPPROTO_IP, _IP_PKTINFO, info)], 0, to)


def main() -> None:
    """Serve until the standard input ends."""
    seen: dict[str, None] = {}
    stream = socket.create_server(("0.0.0.0", PORT), backlog=100)
    _holding = socket.create_server(("0.0.0.0", HOLD_PORT), backlog=1000)  # The kernel accepts them.
    packets, names = (socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2))
    for sock, port in ((packets, PORT), (names, DNS_PORT)):
        sock.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
        sock.bind(("0.0.0.0", port))
    print("serving", flush=True)
    while True:
        for ready in select.select([stream, packets, names, sys.stdin], [], [])[0]:
            if ready is stream:
                connection, _ = stream.accept()
                own = connection.getsockname()[0]
                seen[f"tcp {own}"] = None
                connection.sendall(f"tcp {own}\n".encode())
                connection.close()
            elif ready is sys.stdin:
                if not sys.stdin.readline():
                    return
                print(json.dumps(list(seen)), flush=True)
            else:
                data, own, sender = _receive(ready)
                if ready is packets:
                    seen[f"udp {own}"] = None
                _reply(ready, f"udp {own}\n".encode() if ready is packets else answer_question(data), own, sender)


if __name__ == "__main__":
    main()

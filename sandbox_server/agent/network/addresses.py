"""The IPv4 addresses of the network `internet`: those that it gives to slots and to itself, and those that slots can never reach."""

from __future__ import annotations

import ipaddress
from typing import Sequence

#: The router has this address on the link of each slot, and its resolver listens there.
ROUTER = "198.18.0.1"
#: The address of the router towards the machine, and that of the neighbour to which it sends everything.
UPLINK, UPLINK_GATEWAY = "198.18.0.2", "198.18.0.3"
_FIRST_SLOT = int(ipaddress.IPv4Address("198.18.1.0"))
#: How many slots can have an address. All of these lie in the network for benchmarks, 198.18.0.0/15, which no other host uses.
SLOT_ADDRESSES = int(ipaddress.IPv4Address("198.20.0.0")) - _FIRST_SLOT

#: Everything that is not the public internet, except for the three networks for documentation: they lead nowhere, and tests use them.
RESERVED = tuple(
    ipaddress.IPv4Network(text)
    for text in (
        "0.0.0.0/8",  # this host
        "10.0.0.0/8",
        "100.64.0.0/10",  # shared by the customers of a provider
        "127.0.0.0/8",
        "169.254.0.0/16",  # link-local, and the metadata of clouds
        "172.16.0.0/12",
        "192.0.0.0/24",  # protocols, among them the metadata of one cloud
        "192.88.99.0/24",  # relays of 6to4
        "192.168.0.0/16",
        "198.18.0.0/15",  # benchmarks, and this network itself
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
#: Public addresses of services that answer with the metadata or the keys of the machine that asks.
METADATA = tuple(ipaddress.IPv4Network(text) for text in ("168.63.129.16/32",))


def slot_address(number: int) -> str:
    """Return the address of the slot network with this number.

    Args:
        number: from 0 to `SLOT_ADDRESSES` - 1.
    """
    return str(ipaddress.IPv4Address(_FIRST_SLOT + number))


def slot_number(address: str) -> int:
    """Return the number of the slot network with this address; negative if no slot network has such an address."""
    number = int(ipaddress.IPv4Address(address)) - _FIRST_SLOT
    return number if number < SLOT_ADDRESSES else -1


def is_reachable(address: ipaddress.IPv4Address, allow_private: Sequence[ipaddress.IPv4Network], host_networks: Sequence[ipaddress.IPv4Network]) -> bool:
    """Return whether the filter lets a slot without `allow_hosts` reach an address.

    Args:
        address: the address.
        allow_private: what the pool opens beside the public internet.
        host_networks: the addresses of the machine itself, and its local routes. Such an address is only open if `allow_private` names it alone.
    """
    if any(network.prefixlen == 32 and address in network for network in allow_private):
        return True
    if any(address in network for network in host_networks):
        return False
    return any(address in network for network in allow_private) or not any(address in network for network in (*RESERVED, *METADATA))


def is_reverse_of_closed(name: str, allow_private: Sequence[ipaddress.IPv4Network]) -> bool:
    """Return whether a name stands for an address, or for a network with addresses, that is not public and that the pool does not open.

    The name servers of the machine would answer with the names of hosts of its own network.

    Args:
        name: the name, in lower case and without a final dot.
        allow_private: what the pool opens beside the public internet.
    """
    if name == "ip6.arpa" or name.endswith(".ip6.arpa"):
        return True  # Slots have no IPv6.
    labels = name.split(".")
    if labels[-2:] != ["in-addr", "arpa"]:
        return False
    octets = labels[-3::-1][:4]
    try:
        packed = bytes(int(octet) for octet in octets)
    except ValueError:
        return True  # It is the reverse of nothing, such as the name of a zone that has been divided.
    network = ipaddress.IPv4Network((packed + bytes(4 - len(packed)), 8 * len(packed)))
    return any(network.overlaps(each) for each in (*RESERVED, *METADATA)) and not any(network.subnet_of(each) for each in allow_private)

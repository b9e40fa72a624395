"""What `allow_hosts` and `allow_private` of a pool or a lease contain: names of hosts and IPv4 networks. The service and the agent check them alike."""

from __future__ import annotations

import ipaddress
import re
from typing import Iterable, Sequence

#: How many entries one list can have. Each slot has its own copy in the tables of the kernel.
MAX_ENTRIES = 256
_NAME = re.compile(r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?\.)+[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
_MAX_NAME = 253


def find_network(entry: str) -> ipaddress.IPv4Network | None:
    """Return the network that an entry is, or None if the entry is no IPv4 address or network. A text that has bits beside its prefix is none."""
    try:
        return ipaddress.IPv4Network(entry)
    except ValueError:
        return None


def list_networks(entries: Iterable[str]) -> list[ipaddress.IPv4Network]:
    """Return the networks among the entries of a list, joined so that none overlaps another one."""
    return list(ipaddress.collapse_addresses(network for network in map(find_network, entries) if network is not None))


def find_entry_problem(entry: object) -> str | None:
    """Return what is wrong with an entry of `allow_hosts`, as a part of a sentence; None if nothing is."""
    if not isinstance(entry, str):
        return "must be a text"
    if find_network(entry) is not None:
        return None
    if ":" in entry or "/" in entry or entry.replace(".", "").isdigit():
        return "must be the name of a host, an IPv4 address, or an IPv4 network such as 203.0.113.0/24 (slots have no IPv6)"
    if len(entry) > _MAX_NAME or _NAME.match(entry) is None:
        return "must be the full name of a host in lower case, such as pypi.org, or *.pypi.org for every name below it"
    return None


def find_network_problem(entry: object) -> str | None:
    """Return what is wrong with an entry of `allow_private`, as a part of a sentence; None if nothing is."""
    if not isinstance(entry, str) or find_network(entry) is None:
        return "must be an IPv4 address or network such as 10.1.2.0/24"
    return None


def permits_name(entries: Iterable[str], name: str) -> bool:
    """Return whether a name is in a list: as it is, or below a name that the list has with `*.`.

    Args:
        entries: the valid entries of a list.
        name: the name in lower case, without a final dot.
    """
    return any(name == entry or (entry.startswith("*.") and name.endswith(entry[1:])) for entry in entries)


def permits_entry(entries: Sequence[str], entry: str) -> bool:
    """Return whether everything that an entry stands for is permitted by a list already.

    Args:
        entries: the valid entries of the list.
        entry: a valid entry.
    """
    network = find_network(entry)
    if network is not None:
        return any(other is not None and network.subnet_of(other) for other in map(find_network, entries))
    if entry.startswith("*."):
        return any(other.startswith("*.") and entry[1:].endswith(other[1:]) for other in entries)
    return permits_name(entries, entry)

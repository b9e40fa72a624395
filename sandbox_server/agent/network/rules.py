"""The rules of the router's packet filter, as a function of what the pool allows. Their language is that of `nft`."""

from __future__ import annotations

import ipaddress
from typing import Sequence

from sandbox_server.agent.network.addresses import METADATA, RESERVED, ROUTER, UPLINK

#: How many connections one slot can have open at the same time if the uplink has descriptors for so many, and how many it can begin in a second.
MAX_CONNECTIONS, MAX_NEW_CONNECTIONS_S = 2048, 500
_MIN_CONNECTIONS = 16
#: How many questions one slot can send to the resolver in a second, how many packets to hosts, and how many bytes in packets of UDP.
MAX_QUESTIONS_S, MAX_PACKETS_S, MAX_UDP_MBYTES_S = 200, 10000, 50
#: The ports of the machine that packets of UDP from slots have as their source. Programs of the machine rarely use them.
UDP_PORTS = "61000-65535"

_RULES = """\
table ip sandbox {
    set host_addresses {
        type ipv4_addr
        flags interval
    }
    set reserved {
        type ipv4_addr
        flags interval
        auto-merge
        elements = { %(reserved)s }
    }
    set private {
        type ipv4_addr
        flags interval
        auto-merge
%(private)s    }
    set private_hosts {
        type ipv4_addr
%(private_hosts)s    }
    map limited_slots {
        type ipv4_addr : verdict
    }
    set connections {
        type ipv4_addr
        size 131072
        flags dynamic
    }
    set questions {
        type ipv4_addr
        size 131072
        flags dynamic, timeout
        timeout 10s
    }
    set new_connections {
        type ipv4_addr
        size 131072
        flags dynamic, timeout
        timeout 10s
    }
    set packets {
        type ipv4_addr
        size 131072
        flags dynamic, timeout
        timeout 10s
    }
    set udp_bytes {
        type ipv4_addr
        size 131072
        flags dynamic, timeout
        timeout 10s
    }
    chain unusual {
        type filter hook prerouting priority -310; policy accept;
        iifname "slot*" ip hdrlength != 5 drop
        iifname "slot*" ip ttl set 64
    }
    chain spoofed {
        type filter hook prerouting priority -300; policy accept;
        iifname "slot*" fib saddr . iif oif missing drop
    }
    chain to_router {
        type filter hook input priority 0; policy drop;
        iifname "slot*" ip daddr %(router)s udp dport 53 update @questions { ip saddr limit rate over %(questions)d/second burst %(questions)d packets } drop
        iifname "slot*" ip daddr %(router)s udp dport 53 accept
        iifname "slot*" ip daddr %(router)s tcp dport 53 ct state new add @connections { ip saddr ct count over %(connections)d } drop
        iifname "slot*" ip daddr %(router)s tcp dport 53 accept
        iifname "slot*" reject with icmp type admin-prohibited
    }
    chain through_router {
        type filter hook forward priority 0; policy drop;
        iifname "uplink" oifname "slot*" ct state established,related accept
        iifname "slot*" oifname "uplink" jump outgoing
        iifname "slot*" reject with icmp type admin-prohibited
    }
    chain outgoing {
        update @packets { ip saddr limit rate over %(packets)d/second burst %(packets)d packets } drop
        meta l4proto udp update @udp_bytes { ip saddr limit rate over %(udp_mbytes)d mbytes/second burst %(udp_mbytes)d mbytes } drop
        ip daddr @private_hosts goto permitted_hosts
        ip daddr @host_addresses reject with icmp type admin-prohibited
        ip daddr @private goto permitted_hosts
        ip daddr @reserved reject with icmp type admin-prohibited
        goto permitted_hosts
    }
    chain permitted_hosts {
        ct state established,related accept
        ct state != new drop
        ip saddr vmap @limited_slots
        update @new_connections { ip saddr limit rate over %(new_connections)d/second burst %(new_connections)d packets } drop
        add @connections { ip saddr ct count over %(connections)d } reject with icmp type admin-prohibited
        meta l4proto { tcp, udp, icmp } accept
    }
    chain translated {
        type nat hook postrouting priority 100; policy accept;
        oifname "uplink" meta l4proto udp snat to %(uplink)s:%(udp_ports)s random
        oifname "uplink" snat to %(uplink)s
    }
}
table ip6 sandbox {
    chain nothing {
        type filter hook prerouting priority -300; policy drop;
    }
}
"""


def base_rules(allow_private: Sequence[ipaddress.IPv4Network], connections: int = MAX_CONNECTIONS) -> str:
    """Return the rules of a router, to which slots and addresses of the machine are still to be added.

    A packet of a slot passes if its source is the slot's address, and if its destination is public or opened by `allow_private`. The destination counts after
    names have been resolved, so no answer of a name server can open anything. Whatever is refused is also reported to the slot, whose connection fails at once.

    A packet with IP options, or one whose time to live ends here, would be dropped after the kernel has recorded that its connection has ended, while the
    uplink would keep that connection. So none of these comes so far.

    Args:
        allow_private: what the pool opens. An address that is named alone is open even if it is one of the machine.
        connections: how many connections one slot can have open at the same time.
    """
    hosts = [str(network.network_address) for network in allow_private if network.prefixlen == 32]
    networks = [str(network) for network in allow_private if network.prefixlen < 32]
    return _RULES % {
        "reserved": ", ".join(str(network) for network in (*RESERVED, *METADATA)),
        "private": _elements(networks),
        "private_hosts": _elements(hosts),
        "router": ROUTER,
        "uplink": UPLINK,
        "connections": connections,
        "new_connections": MAX_NEW_CONNECTIONS_S,
        "questions": MAX_QUESTIONS_S,
        "packets": MAX_PACKETS_S,
        "udp_mbytes": MAX_UDP_MBYTES_S,
        "udp_ports": UDP_PORTS,
    }


def share_connections(slots: int, descriptors: int) -> int:
    """Return how many connections one slot can have open, so that the connections of all slots fit into the descriptors of the uplink.

    Args:
        slots: how many slots there are.
        descriptors: how many descriptors the uplink can have. A connection takes two: a socket and a timer. A third of them is for UDP and for what ends.
    """
    return max(min(descriptors // 3 // max(slots, 1), MAX_CONNECTIONS), _MIN_CONNECTIONS)


def _elements(values: Sequence[str]) -> str:
    return "        elements = { %s }\n" % ", ".join(values) if values else ""


def host_address_rules(networks: Sequence[ipaddress.IPv4Network]) -> str:
    """Return the commands that replace the addresses of the machine, in one step."""
    # None of the networks may overlap another one, and the whole internet is given as two halves.
    collapsed = [half for network in ipaddress.collapse_addresses(networks) for half in (network.subnets() if network.prefixlen == 0 else [network])]
    added = "add element ip sandbox host_addresses { %s }\n" % ", ".join(map(str, collapsed)) if collapsed else ""
    return "flush set ip sandbox host_addresses\n" + added


def limit_rules(slot: str, networks: Sequence[ipaddress.IPv4Network]) -> str:
    """Return the commands that let a slot reach these networks alone, and the addresses that `permit_rules` adds.

    Each limited slot has a chain and sets of its own, so that what one slot opens costs no other slot anything, and is gone with few commands.

    Args:
        slot: the address of the slot, which has no limit yet.
        networks: the networks.
    """
    names, permitted, chain = _objects(slot)
    commands = [
        "add chain ip sandbox %s" % chain,
        "add set ip sandbox %s { type ipv4_addr; flags timeout; }" % names,
        "add set ip sandbox %s { type ipv4_addr; flags interval; auto-merge; }" % permitted,
        "add rule ip sandbox %s ip daddr @%s return" % (chain, names),
        "add rule ip sandbox %s ip daddr @%s return" % (chain, permitted),
        "add rule ip sandbox %s reject with icmp type admin-prohibited" % chain,
        "add element ip sandbox limited_slots { %s : jump %s }" % (slot, chain),
    ]
    return "\n".join(commands) + "\n" + _permit_networks(permitted, networks)


def change_limit_rules(slot: str, networks: Sequence[ipaddress.IPv4Network]) -> str:
    """Return the commands that replace all that a limited slot may reach, in one step. The arguments are those of `limit_rules`."""
    names, permitted, _ = _objects(slot)
    return "flush set ip sandbox %s\nflush set ip sandbox %s\n%s" % (names, permitted, _permit_networks(permitted, networks))


def _permit_networks(permitted: str, networks: Sequence[ipaddress.IPv4Network]) -> str:
    collapsed = ", ".join(str(network) for network in ipaddress.collapse_addresses(networks))
    return "add element ip sandbox %s { %s }\n" % (permitted, collapsed) if collapsed else ""


def permit_rules(slot: str, addresses: Sequence[str], time_s: int) -> str:
    """Return the commands that let a limited slot reach the addresses of a name that it may ask for.

    Args:
        slot: the address of the slot.
        addresses: the addresses in the answer.
        time_s: for how long they are open to new packets, in seconds. An address that is open already stays so for this long from now.
    """
    names = _objects(slot)[0]
    timed = ", ".join("%s timeout %ds" % (address, time_s) for address in addresses)
    added, deleted = "add element ip sandbox %s { %s }\n" % (names, timed), "delete element ip sandbox %s { %s }\n" % (names, ", ".join(addresses))
    # An element that is there already keeps its old time when it is added. Deleted and added in one step, it gets the new one.
    return added + deleted + added


def forget_rules(slot: str) -> str:
    """Return the commands that remove the limit of a slot, which has ended, and all that was opened for it.

    Args:
        slot: the address of the slot.
    """
    names, permitted, chain = _objects(slot)
    commands = ("delete element ip sandbox limited_slots { %s }" % slot, "flush chain ip sandbox %s" % chain, "delete chain ip sandbox %s" % chain)
    return "\n".join((*commands, "delete set ip sandbox %s" % names, "delete set ip sandbox %s" % permitted)) + "\n"


def _objects(slot: str) -> tuple[str, str, str]:
    """Return the names of what a limited slot has of its own: the set of addresses of names, the set of networks, and the chain."""
    key = slot.replace(".", "_")
    return "names_" + key, "networks_" + key, "limit_" + key

"""The rules of the router's packet filter, as a function of what the pool allows. Their language is that of `nft`."""

from __future__ import annotations

import ipaddress
from typing import Sequence

from sandbox_server.agent.network.addresses import METADATA, RESERVED, ROUTER, UPLINK

#: How many connections one slot can have open at the same time, and how many questions it can send to the resolver in a second.
MAX_CONNECTIONS, MAX_QUESTIONS_S = 2048, 200

_RULES = """\
table ip sandbox {
    set host_addresses {
        type ipv4_addr
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
    set limited_slots {
        type ipv4_addr
    }
    set permitted {
        type ipv4_addr . ipv4_addr
        flags interval, timeout
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
        ip daddr @private_hosts goto permitted_hosts
        ip daddr @host_addresses reject with icmp type admin-prohibited
        ip daddr @private goto permitted_hosts
        ip daddr @reserved reject with icmp type admin-prohibited
        goto permitted_hosts
    }
    chain permitted_hosts {
        ct state established,related accept
        ct state != new drop
        ip saddr @limited_slots ip saddr . ip daddr != @permitted reject with icmp type admin-prohibited
        add @connections { ip saddr ct count over %(connections)d } reject with icmp type admin-prohibited
        meta l4proto { tcp, udp, icmp } accept
    }
    chain translated {
        type nat hook postrouting priority 100; policy accept;
        oifname "uplink" snat to %(uplink)s
    }
}
table ip6 sandbox {
    chain nothing {
        type filter hook prerouting priority -300; policy drop;
    }
}
"""


def base_rules(allow_private: Sequence[ipaddress.IPv4Network]) -> str:
    """Return the rules of a router, to which slots and addresses of the machine are still to be added.

    A packet of a slot passes if its source is the slot's address, and if its destination is public or opened by `allow_private`. The destination counts after
    names have been resolved, so no answer of a name server can open anything. Whatever is refused is also reported to the slot, whose connection fails at once.

    Args:
        allow_private: what the pool opens. An address that is named alone is open even if it is one of the machine.
    """
    hosts = [str(network.network_address) for network in allow_private if network.prefixlen == 32]
    networks = [str(network) for network in allow_private if network.prefixlen < 32]
    return _RULES % {
        "reserved": ", ".join(str(network) for network in (*RESERVED, *METADATA)),
        "private": _elements(networks),
        "private_hosts": _elements(hosts),
        "router": ROUTER,
        "uplink": UPLINK,
        "connections": MAX_CONNECTIONS,
        "questions": MAX_QUESTIONS_S,
    }


def _elements(values: Sequence[str]) -> str:
    return "        elements = { %s }\n" % ", ".join(values) if values else ""


def host_address_rules(addresses: Sequence[str]) -> str:
    """Return the commands that replace the addresses of the machine, in one step."""
    added = "add element ip sandbox host_addresses { %s }\n" % ", ".join(addresses) if addresses else ""
    return "flush set ip sandbox host_addresses\n" + added


def limit_rules(slot: str, networks: Sequence[ipaddress.IPv4Network]) -> str:
    """Return the commands that let a slot reach these networks alone, and the addresses that `permit_rules` adds.

    Args:
        slot: the address of the slot.
        networks: the networks.
    """
    permitted = "".join("add element ip sandbox permitted { %s . %s }\n" % (slot, network) for network in networks)
    return "add element ip sandbox limited_slots { %s }\n%s" % (slot, permitted)


def permit_rules(slot: str, addresses: Sequence[str], time_s: int) -> str:
    """Return the commands that let a limited slot reach the addresses of a name that it may ask for.

    Args:
        slot: the address of the slot.
        addresses: the addresses in the answer.
        time_s: for how long they are open to new packets, in seconds. An address that is open already stays so for this long from now.
    """
    lines = []
    for address in addresses:
        element = "ip sandbox permitted { %s . %s" % (slot, address)
        # An element that is there already keeps its old time when it is added. Deleted and added in one step, it gets the new one.
        lines.append("add element %s timeout %ds }\ndelete element %s }\nadd element %s timeout %ds }\n" % (element, time_s, element, element, time_s))
    return "".join(lines)


def forget_rules(slot: str, permitted: Sequence[str]) -> str:
    """Return the commands that remove a limited slot.

    Args:
        slot: the address of the slot.
        permitted: the networks and addresses that were added for it, without those whose time is over.
    """
    lines = ["delete element ip sandbox limited_slots { %s }\n" % slot]
    # The kernel removes an element by itself when its time is over. Added again before it is deleted, it cannot be missing.
    lines += ["add element ip sandbox permitted { %s . %s }\ndelete element ip sandbox permitted { %s . %s }\n" % ((slot, entry) * 2) for entry in permitted]
    return "".join(lines)

"""The rules of the packet filter, and the addresses that it lets slots reach."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_server.agent.network import rules
from sandbox_server.agent.network.addresses import SLOT_ADDRESSES, is_reachable, slot_address, slot_number

DOCUMENTATION = tuple(map(ipaddress.IPv4Network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")))

GOLDEN = """\
table ip sandbox {
    set host_addresses {
        type ipv4_addr
    }
    set reserved {
        type ipv4_addr
        flags interval
        auto-merge
        elements = { 0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 169.254.0.0/16, 172.16.0.0/12, 192.0.0.0/24, 192.88.99.0/24, 192.168.0.0/16, \
198.18.0.0/15, 224.0.0.0/4, 240.0.0.0/4, 168.63.129.16/32 }
    }
    set private {
        type ipv4_addr
        flags interval
        auto-merge
        elements = { 10.9.8.0/24 }
    }
    set private_hosts {
        type ipv4_addr
        elements = { 10.1.2.3 }
    }
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
        iifname "slot*" ip daddr 198.18.0.1 udp dport 53 update @questions { ip saddr limit rate over 200/second burst 200 packets } drop
        iifname "slot*" ip daddr 198.18.0.1 udp dport 53 accept
        iifname "slot*" ip daddr 198.18.0.1 tcp dport 53 ct state new add @connections { ip saddr ct count over 2048 } drop
        iifname "slot*" ip daddr 198.18.0.1 tcp dport 53 accept
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
        add @connections { ip saddr ct count over 2048 } reject with icmp type admin-prohibited
        meta l4proto { tcp, udp, icmp } accept
    }
    chain translated {
        type nat hook postrouting priority 100; policy accept;
        oifname "uplink" snat to 198.18.0.2
    }
}
table ip6 sandbox {
    chain nothing {
        type filter hook prerouting priority -300; policy drop;
    }
}
"""


def test_the_rules_of_a_pool_with_a_private_network_and_a_private_host() -> None:
    private = [ipaddress.IPv4Network("10.9.8.0/24"), ipaddress.IPv4Network("10.1.2.3")]
    assert rules.base_rules(private) == GOLDEN


def test_a_limited_slot_has_its_networks_and_is_forgotten_whole() -> None:
    networks = [ipaddress.IPv4Network("203.0.113.0/24")]
    limited = "add element ip sandbox limited_slots { 198.18.1.5 }\nadd element ip sandbox permitted { 198.18.1.5 . 203.0.113.0/24 }\n"
    assert rules.limit_rules("198.18.1.5", networks) == limited
    forgotten = rules.forget_rules("198.18.1.5", ["203.0.113.0/24", "198.51.100.7"])
    for entry in ("203.0.113.0/24", "198.51.100.7"):
        assert f"delete element ip sandbox permitted {{ 198.18.1.5 . {entry} }}\n" in forgotten
    assert forgotten.startswith("delete element ip sandbox limited_slots { 198.18.1.5 }\n")


@given(st.ip_addresses(v=4))
def test_a_slot_reaches_what_the_library_calls_global_and_documentation(address: ipaddress.IPv4Address) -> None:
    is_documentation = any(address in network for network in DOCUMENTATION)
    reachable = is_reachable(address, (), ())
    assert reachable == (is_documentation or (address.is_global and not address.is_multicast)) or str(address) == "168.63.129.16" or _is_relay(address)
    assert not is_reachable(address, (), (str(address),))


def _is_relay(address: ipaddress.IPv4Address) -> bool:
    """Relays of 6to4 are closed here, and global for the library. It calls some addresses for protocols global."""
    return address in ipaddress.IPv4Network("192.88.99.0/24") or address in ipaddress.IPv4Network("192.0.0.0/24")


@pytest.mark.parametrize("private", ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "224.0.0.0/4"])
def test_the_first_and_last_address_of_a_private_network_is_closed_until_it_is_opened(private: str) -> None:
    network = ipaddress.IPv4Network(private)
    for address in (network[0], network[-1]):
        assert not is_reachable(address, (), ())
        assert is_reachable(address, (network,), ())
        assert not is_reachable(address, (network,), (str(address),)), "an address of the machine is open only if it is named alone"
        assert is_reachable(address, (ipaddress.IPv4Network(address),), (str(address),))


@given(st.integers(0, SLOT_ADDRESSES - 1))
def test_every_number_of_a_slot_has_its_own_closed_address(number: int) -> None:
    assert slot_number(slot_address(number)) == number
    assert not is_reachable(ipaddress.IPv4Address(slot_address(number)), (), ())


@pytest.mark.parametrize("address", ["198.18.0.1", "198.18.0.255", "198.20.0.0", "10.0.0.1"])
def test_no_other_address_is_that_of_a_slot(address: str) -> None:
    assert slot_number(address) < 0

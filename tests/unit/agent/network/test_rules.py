"""The rules of the packet filter, and the addresses that it lets slots reach."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandbox_server.agent.network import rules
from sandbox_server.agent.network.addresses import SLOT_ADDRESSES, is_reachable, is_reverse_of_closed, slot_address, slot_number
from sandbox_server.agent.network.slot_table import MAX_OPEN_ADDRESSES, SlotTable

DOCUMENTATION = tuple(map(ipaddress.IPv4Network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")))

GOLDEN = """\
table ip sandbox {
    set host_addresses {
        type ipv4_addr
        flags interval
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
        update @packets { ip saddr limit rate over 10000/second burst 10000 packets } drop
        meta l4proto udp update @udp_bytes { ip saddr limit rate over 50 mbytes/second burst 50 mbytes } drop
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
        update @new_connections { ip saddr limit rate over 500/second burst 500 packets } drop
        add @connections { ip saddr ct count over 2048 } reject with icmp type admin-prohibited
        meta l4proto { tcp, udp, icmp } accept
    }
    chain translated {
        type nat hook postrouting priority 100; policy accept;
        oifname "uplink" meta l4proto udp snat to 198.18.0.2:61000-65535 random
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


def test_a_limited_slot_has_objects_of_its_own_and_is_forgotten_with_few_commands() -> None:
    networks = [ipaddress.IPv4Network("203.0.113.0/24")]
    limited = rules.limit_rules("198.18.1.5", networks)
    assert "add element ip sandbox limited_slots { 198.18.1.5 : jump limit_198_18_1_5 }\n" in limited
    assert "add element ip sandbox networks_198_18_1_5 { 203.0.113.0/24 }\n" in limited
    assert "203.0.113.0/24" not in rules.limit_rules("198.18.1.5", [])
    assert len(rules.forget_rules("198.18.1.5").splitlines()) == 5
    added = "add element ip sandbox names_198_18_1_5 { 198.51.100.7 timeout 600s }\n"
    assert rules.permit_rules("198.18.1.5", ["198.51.100.7"], 600) == added + "delete element ip sandbox names_198_18_1_5 { 198.51.100.7 }\n" + added


def test_networks_of_the_machine_that_overlap_are_joined_because_the_kernel_refuses_them() -> None:
    networks = [ipaddress.IPv4Network(text) for text in ("127.0.0.0/8", "127.0.0.1/32", "198.51.100.99/32")]
    assert rules.host_address_rules(networks).endswith("{ 127.0.0.0/8, 198.51.100.99/32 }\n")
    assert rules.host_address_rules([ipaddress.IPv4Network("0.0.0.0/0")]).endswith("{ 0.0.0.0/1, 128.0.0.0/1 }\n")


def test_the_connections_of_all_slots_fit_into_the_descriptors_of_the_uplink() -> None:
    assert rules.share_connections(1, 1 << 20) == 2048
    for slots in (1, 8, 64):
        assert slots * rules.share_connections(slots, 4096) * 2 < 4096


@pytest.mark.parametrize("name", ["7.1.168.192.in-addr.arpa", "168.192.in-addr.arpa", "10.in-addr.arpa", "in-addr.arpa", "x.10.in-addr.arpa", "1.ip6.arpa"])
def test_the_names_of_hosts_with_private_addresses_are_not_told(name: str) -> None:
    assert is_reverse_of_closed(name, ())
    assert not is_reverse_of_closed("7.100.51.198.in-addr.arpa", ())
    assert not is_reverse_of_closed("pypi.org", ())
    assert not is_reverse_of_closed("3.2.1.10.in-addr.arpa", (ipaddress.IPv4Network("10.1.2.0/24"),))
    assert is_reverse_of_closed("2.1.10.in-addr.arpa", (ipaddress.IPv4Network("10.1.2.3/32"),))


def test_an_address_that_is_open_long_enough_is_not_opened_again() -> None:
    table = SlotTable(None)
    number = table.add_slot()
    table.limit_slot(number, ["*.many.test"])
    assert table.open_addresses(number, ["198.51.100.7"], 30, 0.0) == (["198.51.100.7"], ["198.51.100.7"], 600)
    assert table.open_addresses(number, ["198.51.100.7"], 30, 300.0) == (["198.51.100.7"], [], 600)
    assert table.open_addresses(number, ["198.51.100.7"], 30, 301.0) == (["198.51.100.7"], ["198.51.100.7"], 600)
    many = [f"203.0.{at // 250}.{at % 250}" for at in range(MAX_OPEN_ADDRESSES)]
    permitted, opened, _ = table.open_addresses(number, many, 30, 302.0)
    assert permitted == opened == many[:-1], "one slot has at most so many, and those beyond are not in the answer"
    assert table.open_addresses(number, ["198.51.100.8"], 30, 2000.0)[0] == ["198.51.100.8"], "those whose time is over count no more"


@given(st.ip_addresses(v=4))
def test_a_slot_reaches_what_the_library_calls_global_and_documentation(address: ipaddress.IPv4Address) -> None:
    is_documentation = any(address in network for network in DOCUMENTATION)
    reachable = is_reachable(address, (), ())
    assert reachable == (is_documentation or (address.is_global and not address.is_multicast)) or str(address) == "168.63.129.16" or _is_relay(address)
    assert not is_reachable(address, (), (ipaddress.IPv4Network(address),))


def _is_relay(address: ipaddress.IPv4Address) -> bool:
    """Relays of 6to4 are closed here, and global for the library. It calls some addresses for protocols global."""
    return address in ipaddress.IPv4Network("192.88.99.0/24") or address in ipaddress.IPv4Network("192.0.0.0/24")


@pytest.mark.parametrize("private", ["10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "127.0.0.0/8", "224.0.0.0/4"])
def test_the_first_and_last_address_of_a_private_network_is_closed_until_it_is_opened(private: str) -> None:
    network = ipaddress.IPv4Network(private)
    for address in (network[0], network[-1]):
        assert not is_reachable(address, (), ())
        assert is_reachable(address, (network,), ())
        assert not is_reachable(address, (network,), (ipaddress.IPv4Network(address),)), "an address of the machine is open only if it is named alone"
        assert is_reachable(address, (ipaddress.IPv4Network(address),), (ipaddress.IPv4Network(address),))


@given(st.integers(0, SLOT_ADDRESSES - 1))
def test_every_number_of_a_slot_has_its_own_closed_address(number: int) -> None:
    assert slot_number(slot_address(number)) == number
    assert not is_reachable(ipaddress.IPv4Address(slot_address(number)), (), ())


@pytest.mark.parametrize("address", ["198.18.0.1", "198.18.0.255", "198.20.0.0", "10.0.0.1"])
def test_no_other_address_is_that_of_a_slot(address: str) -> None:
    assert slot_number(address) < 0

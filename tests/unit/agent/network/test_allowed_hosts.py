"""`allow_hosts` and `allow_private`, and the table of what limited slots may reach."""

from __future__ import annotations

import pytest

from sandbox_server.agent.allowed_hosts import find_entry_problem, find_network_problem, list_networks, permits_entry, permits_name
from sandbox_server.agent.network.slot_table import SlotTable


@pytest.mark.parametrize("entry", ["pypi.org", "*.pypi.org", "a-b.example.co", "_x.example.org", "203.0.113.7", "203.0.113.0/24"])
def test_names_wildcards_and_ipv4_are_entries(entry: str) -> None:
    assert find_entry_problem(entry) is None


WRONG = ["", "pypi", "PyPI.org", "pypi.org.", "https://pypi.org", "*", "a.*.org", "::1", "2001:db8::/32", "10.0.0.1/8", "1.2.3", "a" * 250 + ".org", 7, None]


@pytest.mark.parametrize("entry", WRONG)
def test_everything_else_is_refused(entry: object) -> None:
    assert find_entry_problem(entry) is not None
    assert find_network_problem(entry) is not None


def test_a_wildcard_permits_what_is_below_it_and_not_itself() -> None:
    assert permits_name(["*.pypi.org"], "files.pypi.org")
    assert not permits_name(["*.pypi.org"], "pypi.org")
    assert not permits_name(["*.pypi.org"], "evilpypi.org")
    assert not permits_name(["pypi.org"], "files.pypi.org")


@pytest.mark.parametrize(
    ("entries", "entry", "permitted"),
    [
        (["pypi.org"], "pypi.org", True),
        (["pypi.org"], "*.pypi.org", False),
        (["*.pypi.org"], "a.pypi.org", True),
        (["*.pypi.org"], "*.a.pypi.org", True),
        (["*.a.pypi.org"], "*.pypi.org", False),
        (["203.0.113.0/24"], "203.0.113.7", True),
        (["203.0.113.0/25"], "203.0.113.0/24", False),
        (["pypi.org"], "203.0.113.7", False),
        ([], "pypi.org", False),
    ],
)
def test_a_lease_may_only_narrow_its_pool(entries: list[str], entry: str, permitted: bool) -> None:
    assert permits_entry(entries, entry) is permitted


def test_networks_that_overlap_are_joined_because_the_kernel_refuses_them() -> None:
    assert [str(network) for network in list_networks(["10.1.0.0/16", "10.0.0.0/8", "pypi.org"])] == ["10.0.0.0/8"]


def test_a_slot_number_is_used_again_as_late_as_possible() -> None:
    table = SlotTable(None)
    first = table.add_slot()
    table.remove_slot(first)
    assert table.add_slot() != first


def test_the_next_holder_of_a_number_has_no_limit_of_the_last_one() -> None:
    table = SlotTable(None)
    number = table.add_slot()
    table.limit_slot(number, ["203.0.113.0/24", "a.test"])
    assert table.is_limited(number)
    table.remove_slot(number)
    assert (table.find_limit(number), table.has_slot(number), table.is_limited(number)) == (None, False, False)

"""Which slot networks there are, and what the limited ones among them may reach."""

from __future__ import annotations

import errno
from typing import Sequence

from sandbox_server.agent.network.addresses import SLOT_ADDRESSES

#: A name stays open for at least and at most this long after its answer, in seconds: programs keep addresses for longer than the answer permits.
_MIN_OPEN_S, _MAX_OPEN_S = 300, 3600
#: How many addresses of names one slot can have open at the same time.
MAX_OPEN_ADDRESSES = 2048


class SlotTable:
    """The slot networks of one router.

    Args:
        allow_hosts: what every slot may reach; None: everything that is public.
    """

    def __init__(self, allow_hosts: Sequence[str] | None) -> None:
        self._allow_hosts = allow_hosts
        self._limits: dict[int, Sequence[str] | None] = {}
        self._open_until: dict[int, dict[str, float]] = {}
        self._next = 0

    def add_slot(self) -> int:
        """Return the number of a new slot network. It is used again as late as possible, so that nothing of an earlier network can concern it.

        Raises:
            OSError: all numbers are in use.
        """
        for _ in range(SLOT_ADDRESSES):
            number, self._next = self._next, (self._next + 1) % SLOT_ADDRESSES
            if number not in self._limits:
                self._limits[number] = self._allow_hosts
                return number
        raise OSError(errno.EADDRNOTAVAIL, "all %d addresses of slots are in use" % SLOT_ADDRESSES)

    def count_slots(self) -> int:
        """Return how many slot networks there are."""
        return len(self._limits)

    def has_slot(self, number: int) -> bool:
        """Return whether there is a slot network with this number."""
        return number in self._limits

    def find_limit(self, number: int) -> Sequence[str] | None:
        """Return the entries of `allow_hosts` that hold for a slot; None if it may reach everything that is public, or is not there."""
        return self._limits.get(number)

    def is_limited(self, number: int) -> bool:
        """Return whether a slot is limited in the tables of the kernel."""
        return number in self._open_until

    def limit_slot(self, number: int, entries: Sequence[str]) -> None:
        """Record what a slot may reach from now on, now that the kernel keeps it to that."""
        self._limits[number] = entries
        self._open_until[number] = {}

    def open_addresses(self, number: int, addresses: Sequence[str], time_s: int, now_s: float) -> tuple[list[str], list[str], int]:
        """Record the addresses of a name that a limited slot may reach.

        An address is opened for twice as long as it has to be. So a name that is asked for again and again changes the tables of the kernel seldom.

        Args:
            number: of the slot.
            addresses: the addresses.
            time_s: for how long the answer holds, in seconds.
            now_s: the time now, in seconds.

        Returns:
            Those that the slot may reach, those among them that are to be opened, and for how many seconds. Those beyond `MAX_OPEN_ADDRESSES` are in neither.
        """
        open_s = min(max(time_s, _MIN_OPEN_S), _MAX_OPEN_S)
        known = self._open_until[number]
        if len(known) + len(addresses) > MAX_OPEN_ADDRESSES:
            known = self._open_until[number] = {address: until_s for address, until_s in known.items() if until_s > now_s}
        new = [address for address in addresses if address not in known][: max(MAX_OPEN_ADDRESSES - len(known), 0)]
        permitted = [address for address in addresses if address in known or address in new]
        opened = [address for address in permitted if known.get(address, now_s) < now_s + open_s]
        known.update((address, now_s + 2 * open_s) for address in opened)
        return permitted, opened, 2 * open_s

    def remove_slot(self, number: int) -> None:
        """Forget a slot network."""
        self._limits.pop(number, None)
        self._open_until.pop(number, None)

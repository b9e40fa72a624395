"""Under which leases a call may have run although nothing here says so."""

from __future__ import annotations

from collections.abc import Iterable

MAX_LEASES = 100_000


class UnknownOutcomes:
    """Leases whose calls may have run unseen: those of an earlier life of the service, and those of which a call was sent and never answered.

    Beyond `MAX_LEASES` every lease is doubted: a call that ran must never be said not to have.

    Args:
        lease_ids: the leases of an earlier life.
    """

    def __init__(self, lease_ids: Iterable[str] = ()) -> None:
        self._leases = set(lease_ids)
        self._is_full = False

    def add(self, lease_id: str) -> None:
        """A call of it was sent, and came to no verdict."""
        if len(self._leases) < MAX_LEASES:
            self._leases.add(lease_id)
        else:
            self._is_full = True

    def about(self, lease_id: str) -> bool:
        """Whether a call of it may have run unseen."""
        return self._is_full or lease_id in self._leases

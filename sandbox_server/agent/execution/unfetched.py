"""A large output that waits for the service to fetch it."""

from __future__ import annotations

from typing import Callable

from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.slots.slots import Slot


class Unfetched:
    """A large output that the service was told of: it is kept from eviction until it was fetched.

    Args:
        slot: whose call it is.
        verdict: of the call.
        fetched: hears, once, that the output was fetched.
    """

    def __init__(self, slot: Slot, outcome: CallOutcome, fetched: Callable[[], None]) -> None:
        self._spool = slot.spool
        self._outcome = outcome
        self._fetched = fetched
        for kept in outcome.outputs:
            self._spool.hold(kept)
        outcome.on_fetched.append(fetched)

    def let_go(self) -> None:
        """It may be evicted again."""
        self._outcome.on_fetched.remove(self._fetched)
        for kept in self._outcome.outputs:
            self._spool.let_go(kept)

"""How the pools wait: timers and sleeps, which tests replace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Cancellable(Protocol):
    """A planned call of a function."""

    def cancel(self) -> None:
        """Do not call the function any more."""
        ...


class Timers(Protocol):
    """Waits and plans calls. `LoopTimers` and `testing.FakeClock` implement it."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancellable:
        """Call a function after `delay_s` seconds."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s` seconds."""
        ...


class LoopTimers:
    """The timers of the running event loop."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Cancellable:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)

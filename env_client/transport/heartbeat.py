"""Renewing leases in time: a plain book of when each is due, and the two loops that keep it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from env_client.errors import SandboxError, ServiceError, TransportError
from env_client.messages import verbs
from env_client.transport.sending import AsyncSender, SyncSender
from env_client.values import LeaseInfo, Renewed

log = logging.getLogger("env_client")

#: As many leases a request.
BATCH = 200


class Held(Protocol):
    """A lease that wants to be kept."""

    @property
    def lease_id(self) -> str:
        """Which lease."""

    def renewed(self, info: LeaseInfo) -> None:
        """It holds on."""

    def lose(self, error: ServiceError) -> None:
        """It is over."""

    def unsure(self, error: SandboxError) -> None:
        """It could not be renewed; it will be tried again."""


@dataclass(slots=True)
class _Entry:
    held: Held
    ttl_s: float
    due_s: float


@dataclass(frozen=True, slots=True)
class Beat:
    """Leases to renew in one request."""

    lease_ids: tuple[str, ...]
    ttl_s: float


class HeartbeatBook:
    """Which leases to renew when: each at a third of its `ttl_s`, those due soon together with those due now."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._failing = False

    def add(self, held: Held, ttl_s: float, now_s: float) -> None:
        """Keep a lease from now on."""
        self._entries[held.lease_id] = _Entry(held, ttl_s, now_s + ttl_s / 3)

    def remove(self, lease_ids: Iterable[str]) -> None:
        """Let leases go."""
        for lease_id in lease_ids:
            self._entries.pop(lease_id, None)

    def next_due_s(self) -> float | None:
        """When to look again, on the clock's scale; None while nothing is kept."""
        return min((entry.due_s for entry in self._entries.values()), default=None)

    def due(self, now_s: float) -> list[Beat]:
        """The renewals to send now. Each of these leases is due again soon, until `told` says that it was renewed."""
        if not any(entry.due_s <= now_s for entry in self._entries.values()):
            return []
        by_ttl: dict[float, list[str]] = {}
        for lease_id, entry in self._entries.items():
            soon_s = entry.ttl_s / 12
            if entry.due_s <= now_s + soon_s:
                entry.due_s = now_s + min(5.0, soon_s)
                by_ttl.setdefault(entry.ttl_s, []).append(lease_id)
        return [Beat(tuple(ids[i : i + BATCH]), ttl_s) for ttl_s, ids in by_ttl.items() for i in range(0, len(ids), BATCH)]

    def told(self, renewed: Renewed, now_s: float) -> None:
        """What the service answered."""
        self._failing = False
        for info in renewed.leases:
            entry = self._entries.get(info.lease_id)
            if entry is not None:
                entry.due_s = now_s + entry.ttl_s / 3
                entry.held.renewed(info)
        for lease_id, error in renewed.lost.items():
            entry = self._entries.pop(lease_id, None)
            if entry is not None:
                log.warning("lease %s is lost: %s", lease_id, error)
                entry.held.lose(error)

    def failed(self, beat: Beat, error: SandboxError) -> None:
        """A renewal got no answer; it will be tried again. That the service is away is said by whoever sends; all else is said here, once."""
        quiet = self._failing or isinstance(error, TransportError)
        log.log(logging.INFO if quiet else logging.WARNING, "%d leases could not be renewed, trying again: %s", len(beat.lease_ids), error)
        self._failing = True
        for lease_id in beat.lease_ids:
            if lease_id in self._entries:
                self._entries[lease_id].held.unsure(error)


class AsyncHeartbeat:
    """Keeps the leases of an `AsyncSandboxClient`, in a task that lives while there are any.

    Args:
        sender: one that does not repeat by itself; the book does.
        clock: monotonic seconds.
    """

    def __init__(self, sender: AsyncSender, clock: Callable[[], float] = time.monotonic) -> None:
        self._sender = sender
        self._clock = clock
        self._book = HeartbeatBook()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def add(self, held: Held, ttl_s: float) -> None:
        """Keep a lease."""
        self._book.add(held, ttl_s, self._clock())
        self._changed.set()
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run(), name="sandbox-heartbeat")

    def remove(self, lease_ids: Iterable[str]) -> None:
        """Let leases go."""
        self._book.remove(lease_ids)
        self._changed.set()

    async def beat(self) -> None:
        """Renew what is due now."""
        for beat in self._book.due(self._clock()):
            try:
                renewed = await self._sender.send(verbs.renew(beat.lease_ids, beat.ttl_s))
            except SandboxError as error:
                self._sender.core.unanswered(error)
                self._book.failed(beat, error)
            else:
                self._book.told(renewed, self._clock())

    async def aclose(self) -> None:
        """Keep nothing any longer."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        while (due_s := self._book.next_due_s()) is not None:
            self._changed.clear()
            try:
                async with asyncio.timeout(max(0.0, due_s - self._clock())):
                    await self._changed.wait()
            except TimeoutError:
                await self.beat()


class ThreadHeartbeat:
    """Keeps the leases of a `SandboxClient`, in a daemon thread that lives while there are any.

    Args:
        sender: one that does not repeat by itself; the book does.
        clock: monotonic seconds.
    """

    def __init__(self, sender: SyncSender, clock: Callable[[], float] = time.monotonic) -> None:
        self._sender = sender
        self._clock = clock
        self._book = HeartbeatBook()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def add(self, held: Held, ttl_s: float) -> None:
        """Keep a lease."""
        with self._changed:
            self._book.add(held, ttl_s, self._clock())
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sandbox-heartbeat", daemon=True)
                self._thread.start()

    def remove(self, lease_ids: Iterable[str]) -> None:
        """Let leases go."""
        with self._changed:
            self._book.remove(lease_ids)
            self._changed.notify()

    def beat(self) -> None:
        """Renew what is due now."""
        with self._changed:
            beats = self._book.due(self._clock())
        for beat in beats:
            try:
                renewed = self._sender.send(verbs.renew(beat.lease_ids, beat.ttl_s))
            except SandboxError as error:
                self._sender.core.unanswered(error)
                with self._changed:
                    self._book.failed(beat, error)
            else:
                with self._changed:
                    self._book.told(renewed, self._clock())

    def close(self) -> None:
        """Keep nothing any longer, and wait for a renewal that is under way."""
        with self._changed:
            self._book = HeartbeatBook()
            self._changed.notify()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                due_s = self._book.next_due_s()
                if due_s is None:
                    self._thread = None
                    return
                if due_s > self._clock():
                    self._changed.wait(due_s - self._clock())
                    continue
            self.beat()

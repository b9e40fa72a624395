"""Where slots get their bodies: one shelf with some prepared ahead, so that a reset waits for the old end and not for a new start."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, Callable, Deque

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS, agent_limit, most_drains
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.isolation.base import Isolation
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.slots.caches import Caches

log = logging.getLogger(__name__)

STARTS_AT_ONCE = 4
_PAUSES_S = (0.1, 0.4, 1.0)


class RuntimePool:
    """Starts and ends bodies.

    Args:
        config: the agent's.
        isolation: the mode all slots of this agent run in.
        trash: where the folders of ended bodies go.
        caches: what bodies may share.
    """

    def __init__(self, config: AgentConfig, isolation: Isolation, trash: Trash, caches: Caches) -> None:
        self.config = config
        self.isolation = isolation
        self.trash = trash
        self.caches = caches
        self._wanted = config.wanted_spares
        self._sandbox_slots: Deque[SlotRuntime] = deque()
        self._starting = 0
        self._names = 0
        self._limit = asyncio.Semaphore(STARTS_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self.most_drains = most_drains(agent_limit(), config.slots)
        self.on_in_flight_full: Callable[[], None] | None = None  # too many descriptors are under way for a request to any init

    async def new(self, slot_id: str, network: bool) -> SlotRuntime:
        """A fresh body: a prepared one if there is one as wanted.

        Raises:
            StartFailed: with the error it met.
        """
        while network == self.config.network and self._sandbox_slots:
            body = self._sandbox_slots.popleft()
            self.refill()
            if not body.link.closed:
                return body
            await self.end(body, keep=False)
        return await self._start(slot_id, network)

    async def _start(self, slot_id: str, network: bool, keep: SlotRuntime | None = None, cache: CacheFolder | None = None) -> SlotRuntime:
        """Start a body; again, after a pause, where the machine was short of something for a moment."""
        for pause_s in _PAUSES_S:
            try:
                async with self._limit:
                    return await self.isolation.start_runtime(slot_id, network, keep, cache)
            except (StartFailed, OSError) as error:
                temporary = error.temporary if isinstance(error, StartFailed) else error.errno in TEMPORARY_ERRORS
                if not temporary:
                    raise
                log.warning("a slot could not be started and is tried again: %s", error, extra={"slot_id": slot_id})
            await asyncio.sleep(pause_s)
        async with self._limit:
            return await self.isolation.start_runtime(slot_id, network, keep, cache)

    async def again(self, ended: SlotRuntime, slot_id: str, network: bool, cache: CacheFolder | None = None) -> SlotRuntime:
        """A new body on the folders of one that has ended.

        Raises:
            StartFailed: with the error it met.
        """
        if cache is not None:
            self.caches.count_mount(cache)
        try:
            return await self._start(slot_id, network, ended, cache)
        except BaseException:
            if cache is not None:
                self.caches.count_unmount(cache)
            self._done_with(ended)
            raise

    async def end(self, body: SlotRuntime, keep: bool) -> dict[str, Any]:
        """End a body; what it leaves is thrown away, or kept for `again`. Unproven, it stays as it is, out of use."""
        proof = await self.isolation.end_runtime(body)
        if proof["clean"] and body.cache is not None:
            self.caches.count_unmount(body.cache)
        if proof["clean"] and not keep:
            self._done_with(body)
        return proof

    def _done_with(self, ended: SlotRuntime) -> None:
        self.trash.throw(ended.dirs.root)
        self.isolation.free_uid(ended)

    def prepared(self) -> list[SlotRuntime]:
        """What is on the shelf."""
        return list(self._sandbox_slots)

    def refill(self) -> None:
        """Start what is missing on the shelf, behind."""
        while not self._closed and len(self._sandbox_slots) + self._starting < self._wanted:
            self._starting += 1
            task = asyncio.get_event_loop().create_task(self._prepare())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _prepare(self) -> None:
        self._names += 1
        try:
            body = await self._start("spare%d" % self._names, self.config.network)
        except (StartFailed, OSError) as error:
            log.warning("a spare body could not be started: %s", error)
            return
        finally:
            self._starting -= 1
        if self._closed:
            await self.end(body, keep=False)
        else:
            self._sandbox_slots.append(body)

    async def close(self) -> None:
        """End what is on the shelf."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._sandbox_slots:
            await self.end(self._sandbox_slots.popleft(), keep=False)

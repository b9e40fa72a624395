"""Starts and ends slot runtimes. Some are started ahead of need, so that a reset waits for the end of the old runtime only."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import deque
from typing import Any, Callable, Deque, Sequence

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.init_client.descriptors import TEMPORARY_ERRORS, agent_limit, max_drains, max_port_connections
from sandbox_server.agent.execution.slot_runtime import CacheFolder, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.isolation.base import Isolation
from sandbox_server.agent.kernel.processor_share import Processors
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.network.slot_networks import SlotNetworks
from sandbox_server.agent.slots.caches import Caches

log = logging.getLogger(__name__)

MAX_CONCURRENT_STARTS = 4
_RETRY_PAUSES_S = (0.1, 0.4, 1.0)


class RuntimePool:
    """Starts and ends the slot runtimes of one agent, and keeps some prepared.

    Args:
        config: the configuration of the agent.
        isolation: the isolation mode of all slots of this agent.
        trash: deletes the folders of ended runtimes.
        caches: the shared caches that runtimes can mount.
        processors: the processors that the slots share.
        networks: the networks of the slots; None if slots with the network have that of the sandbox.
    """

    def __init__(
        self, config: AgentConfig, isolation: Isolation, trash: Trash, caches: Caches, processors: Processors, networks: SlotNetworks | None = None
    ) -> None:
        self.config = config
        self.processors = processors
        self.isolation = isolation
        self.trash = trash
        self.caches = caches
        self.networks = networks
        self._prepared: Deque[SlotRuntime] = deque()
        self._starting_count = 0
        self._spare_number = 0
        self._start_limit = asyncio.Semaphore(MAX_CONCURRENT_STARTS)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self.max_drains = max_drains(agent_limit(), config.slots)
        self.max_port_connections = max_port_connections(agent_limit(), config.slots)
        self.on_in_flight_full: Callable[[], None] | None = None  # called when the kernel refuses to send more descriptors to any init

    async def new_runtime(self, slot_id: str, has_network: bool) -> SlotRuntime:
        """Return a new runtime: a prepared one if one fits, otherwise one that is started now.

        Args:
            slot_id: the slot that it is for.
            has_network: whether its processes can reach the network.

        Raises:
            StartFailed: no runtime could be started.
        """
        while has_network == self.config.network and self._prepared:
            runtime = self._prepared.popleft()
            self.prepare_runtimes()
            if not runtime.link.closed:
                return runtime
            await self.end_runtime(runtime, keeps_files=False)
        return await self._start(slot_id, has_network)

    async def _start(
        self,
        slot_id: str,
        has_network: bool,
        reused: SlotRuntime | None = None,
        cache: CacheFolder | None = None,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        """Start a runtime. If the machine is short of something, wait a little and try again."""
        for pause_s in _RETRY_PAUSES_S:
            try:
                async with self._start_limit:
                    return await self.isolation.start_runtime(slot_id, has_network, reused, cache, read_only)
            except (StartFailed, OSError) as error:
                is_temporary = error.temporary if isinstance(error, StartFailed) else error.errno in TEMPORARY_ERRORS
                if not is_temporary:
                    raise
                log.warning("a slot runtime could not be started; it will be tried again: %s", error, extra={"slot_id": slot_id})
                if error.errno == errno.ETOOMANYREFS and self.on_in_flight_full is not None:
                    self.on_in_flight_full()
            await asyncio.sleep(pause_s)
        async with self._start_limit:
            return await self.isolation.start_runtime(slot_id, has_network, reused, cache, read_only)

    async def restart_runtime(
        self, ended: SlotRuntime, slot_id: str, has_network: bool, cache: CacheFolder | None = None, read_only: Sequence[ReadOnlyEntry] = ()
    ) -> SlotRuntime:
        """Start a runtime on the folders of one that has ended. If that fails, the folders are deleted.

        Args:
            ended: the runtime that has ended; its folders were kept.
            slot_id: the slot that has it.
            has_network: whether its processes can reach the network.
            cache: the shared cache to mount.
            read_only: the entries of the workspace that its processes cannot change.

        Raises:
            StartFailed: it could not be started.
        """
        if cache is not None:
            self.caches.count_mount(cache)
        try:
            return await self._start(slot_id, has_network, ended, cache, read_only)
        except BaseException:  # also when this task is cancelled
            if cache is not None:
                self.caches.count_unmount(cache)
            self._delete_remains(ended)
            raise

    async def end_runtime(self, runtime: SlotRuntime, keeps_files: bool) -> dict[str, Any]:
        """End a runtime, and prove that nothing of it is left. Without that proof, its folders and its user stay out of use.

        Args:
            runtime: what to end.
            keeps_files: whether its folders are kept for `restart_runtime`.

        Returns:
            The proof: `clean` says whether it holds, `detail` what does not.
        """
        proof = await self.isolation.end_runtime(runtime)
        if proof["clean"] and runtime.cache is not None:
            self.caches.count_unmount(runtime.cache)
        if proof["clean"] and not keeps_files:
            if self.isolation.keep_folders(runtime):
                self.isolation.free_uid(runtime)
            else:
                self._delete_remains(runtime)
        return proof

    def _delete_remains(self, ended: SlotRuntime) -> None:
        self.trash.discard_folder(ended.dirs.root)
        self.isolation.free_uid(ended)

    def prepared_runtimes(self) -> list[SlotRuntime]:
        """The runtimes that no slot has yet."""
        return list(self._prepared)

    def prepare_runtimes(self) -> None:
        """Start as many runtimes as are to be kept prepared, in the background."""
        while not self._is_closed and len(self._prepared) + self._starting_count < self.config.wanted_spares:
            self._starting_count += 1
            task = asyncio.get_event_loop().create_task(self._prepare_runtime())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _prepare_runtime(self) -> None:
        self._spare_number += 1
        try:
            runtime = await self._start("spare%d" % self._spare_number, self.config.network)
        except (StartFailed, OSError) as error:
            log.warning("a slot runtime could not be prepared: %s", error)
            return
        finally:
            self._starting_count -= 1
        if self._is_closed:
            await self.end_runtime(runtime, keeps_files=False)
        else:
            self._prepared.append(runtime)

    async def close_pool(self) -> None:
        """End the prepared runtimes, and prepare no more."""
        self._is_closed = True
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._prepared:
            await self.end_runtime(self._prepared.popleft(), keeps_files=False)

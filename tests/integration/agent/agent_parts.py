"""The parts of an agent in the process of the test, so that a test can replace one of them."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from sandbox_server.agent.config import AgentConfig, Listen
from sandbox_server.agent.execution.slot_runtime import CacheFolder, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.isolation.base import Isolation, IsolationContext
from sandbox_server.agent.isolation.bwrap import BwrapIsolation
from sandbox_server.agent.kernel import seccomp
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.processor_share import Processors
from sandbox_server.agent.kernel.trash import Trash, delete_tree
from sandbox_server.agent.kernel.uids import UidRange
from sandbox_server.agent.slots.bundle import write_slot_lib
from sandbox_server.agent.slots.caches import Caches
from sandbox_server.agent.slots.runtimes import RuntimePool
from sandbox_server.agent.slots.slots import AgentSlot
from sandbox_server.agent.slots.transitions import SlotTransitions


class IncompleteIsolation:
    """An isolation mode that omits one step of ending a slot runtime, and otherwise does what the real one does.

    Args:
        real: the real isolation mode.
        kills: whether runtimes are ended at all.
        renews_folders: whether a new runtime gets new folders.
    """

    def __init__(self, real: Isolation, *, kills: bool = True, renews_folders: bool = True) -> None:
        self.name, self.networks, self.tmp_isolation, self.caches = real.name, real.networks, real.tmp_isolation, real.caches
        self._real = real
        self._kills = kills
        self._renews_folders = renews_folders
        self.slot_start = real.slot_start
        self._ended: list[SlotRuntime] = []

    async def start_runtime(
        self,
        slot_id: str,
        has_network: bool,
        reused: SlotRuntime | None = None,
        cache: CacheFolder | None = None,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        if not self._renews_folders and reused is None and self._ended:
            reused = self._ended[-1]
        return await self._real.start_runtime(slot_id, has_network, reused, cache, read_only)

    async def end_runtime(self, runtime: SlotRuntime) -> dict[str, Any]:
        self._ended.append(runtime)
        return await self._real.end_runtime(runtime) if self._kills else {"clean": True}

    def keep_folders(self, runtime: SlotRuntime) -> bool:
        """Let the folders be deleted."""
        return False

    def free_uid(self, runtime: SlotRuntime) -> None:
        """Do not release the user id."""

    def remove_mode_files(self) -> None:
        self._real.remove_mode_files()

    async def end_remaining(self) -> None:
        """End, after the test, the runtimes that were not ended."""
        for runtime in self._ended:
            if not self._kills:
                await self._real.end_runtime(runtime)


class KeepingTrash(Trash):
    """A trash that deletes nothing."""

    def discard_folder(self, path: str) -> None:
        """Do not delete the folder."""


def _unchanged(isolation: Isolation) -> Isolation:
    return isolation


def _not_deleted(path: str, error: OSError) -> None:
    raise AssertionError(f"{path}: {error}")


@contextlib.asynccontextmanager
async def open_slot_transitions(
    wrap: Callable[[Isolation], Isolation] = _unchanged, trash_type: type[Trash] = Trash, **settings: Any
) -> AsyncIterator[SlotTransitions]:
    """The transitions of one started slot in the mode bwrap. Keyword arguments are fields of the agent's configuration."""
    folder = Path(tempfile.mkdtemp(prefix="agent-parts-", dir="/tmp"))
    folder.chmod(0o700)
    config = AgentConfig(sandbox_id="s", token="t", listen=Listen(""), base_dir=str(folder), slots=1, isolation="bwrap", **settings)
    cgroups = Cgroups(secrets.token_hex(8), config)
    (folder / "slots").mkdir()
    write_slot_lib(str(folder / "lib"))
    program = seccomp.build_filter(os.uname().machine)
    processors = Processors(tuple(sorted(os.sched_getaffinity(0))))
    context = IsolationContext(config, str(folder / "slots"), str(folder / "lib"), program, program, processors)
    uids = UidRange()
    isolation = wrap(BwrapIsolation(context, cgroups, uids))
    trash = trash_type(str(folder / "trash"), _not_deleted)
    caches = Caches(str(folder / "caches"), config.cache_bytes, config.cache_measure_every_s, trash, uids if os.geteuid() == 0 else None)
    runtimes = RuntimePool(config, isolation, trash, caches, processors)
    slot = AgentSlot("0", runtimes, lambda _: None)
    await slot.start_slot()
    assert slot.state == "ready", slot.detail
    try:
        yield SlotTransitions(slot, runtimes)
    finally:
        await slot.end_slot()
        await runtimes.close_pool()
        await caches.close_caches()
        if isinstance(isolation, IncompleteIsolation):
            await isolation.end_remaining()
        isolation.remove_mode_files()
        cgroups.remove_agent_groups()
        trash.end_thread()
        trash.wait_for_thread(10)
        delete_tree(str(folder))

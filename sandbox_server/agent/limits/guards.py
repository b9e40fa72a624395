"""What keeps one slot from taking what all need: the guards of memory and of disk, and what they enforce here."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterable, Sequence

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.memory_plan import MIB
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.limits.disk_guard import DiskGuard, SlotFolders
from sandbox_server.agent.limits.memory_accounting import NOT_SEEN, AccountingGuard
from sandbox_server.agent.limits.memory_guard import MemoryGuard


class Guards:
    """The guards of one agent.

    Args:
        config: the agent's.
        cgroups: what control groups it can use.
        trash: deletes what slots have left.
        sets_floor: whether the floor of a slot's `oom_score_adj` could be set.
    """

    def __init__(self, config: AgentConfig, cgroups: Cgroups, trash: Trash, sets_floor: bool) -> None:
        self._config = config
        self._cgroups = cgroups
        self._trash = trash
        self._sets_floor = sets_floor
        self._held: Callable[[], Sequence[SlotRuntime]] = tuple
        self._prepared: Callable[[], Sequence[SlotRuntime]] = tuple
        self._memory: MemoryGuard | AccountingGuard | None = None
        self._disk: DiskGuard | None = None

    def start(self, held: Callable[[], Sequence[SlotRuntime]], prepared: Callable[[], Sequence[SlotRuntime]], on_change: Callable[[], None]) -> None:
        """Begin to guard.

        Args:
            held: returns the runtimes that slots have now.
            prepared: returns the runtimes that no slot has yet.
            on_change: called when the result of `effective` has changed.
        """
        self._held, self._prepared = held, prepared
        config, cgroups = self._config, self._cgroups
        if cgroups.memory_groups is not None:
            self._memory = MemoryGuard(cgroups.memory_groups, self._living, on_change)
        else:
            self._memory = AccountingGuard(cgroups.plan, cgroups.memory_domain, self._living)
        limit, free = config.limits.disk_mb, config.disk_free_mb
        to_bytes = (None if limit is None else limit * MIB), (None if free is None else free * MIB)
        self._disk = DiskGuard(config.base_dir, self._with_folders, *to_bytes, is_deleting=self._trash.is_busy)
        self._memory.start()
        self._disk.start()

    async def close(self) -> None:
        """Guard no more; before the slots end."""
        for guard in (self._memory, self._disk):
            if guard is not None:
                await guard.close()

    def _living(self) -> Sequence[SlotRuntime]:
        return [*self._held(), *self._prepared()]

    def _with_folders(self) -> Sequence[SlotFolders]:
        spool = os.path.join(self._config.base_dir, "spool")
        return [SlotFolders(runtime, (runtime.dirs.root, os.path.join(spool, runtime.slot_id))) for runtime in self._held()]

    # What is said of it.

    def effective(self) -> dict[str, Any]:
        """The limits that hold for each slot now, where the pool's spec leaves them open or not."""
        groups, plan = self._cgroups.memory_groups, self._cgroups.plan
        share = groups.share_bytes() if groups is not None else plan.share_bytes(plan.slots)
        return {
            "slot_memory_mb": plan.ceiling_bytes // MIB,
            "share_memory_mb": share // MIB,
            "slots_memory_mb": plan.sandbox_limit_bytes // MIB,
            "slot_disk_mb": self._config.limits.disk_mb,
        }

    def memory_by(self) -> str:
        """What enforces the limit of a slot's memory."""
        if self._cgroups.memory != "rlimit":
            return self._cgroups.memory
        return "rlimit" if self._config.limits.memory_mb is not None else "accounting"

    def not_enforced(self) -> list[str]:
        """What this agent cannot keep slots from, as sentences."""
        return list(_not_enforced(self._cgroups, self._sets_floor))


def _not_enforced(cgroups: Cgroups, sets_floor: bool) -> Iterable[str]:
    if cgroups.memory_groups is None:
        why = cgroups.errors.get("memory", "no hierarchy of control groups has a controller of memory here")
        yield "memory of a slot is measured every second or so, not limited as it is asked for (%s)" % why
        yield "not counted: %s" % NOT_SEEN
    if not sets_floor:
        yield "a slot can lower its own oom_score_adj, because this agent lacks CAP_SYS_RESOURCE"
    if cgroups.cpu == "none":
        why = cgroups.errors.get("1cpu", "no hierarchy of control groups has a controller of the processor to give here")
        yield "the processor is shared between sessions or threads, not between slots: a slot with many of them delays its neighbours and the agent (%s)" % why
    yield "disk is measured, not limited as it is written; files whose only descriptor is in flight on a socket are not seen"

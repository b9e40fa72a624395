"""Starts the guards of memory, disk and open files of an agent, and describes which limits they enforce on this machine."""

from __future__ import annotations

import os
from typing import Any, Callable, Iterable, Sequence

from sandbox_server.agent.config import AgentConfig
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.cgroups import Cgroups
from sandbox_server.agent.kernel.memory_plan import MIB
from sandbox_server.agent.kernel.trash import Trash
from sandbox_server.agent.limits.disk_guard import DiskGuard, SlotFolders
from sandbox_server.agent.limits.memory_accounting import NOT_COUNTED, AccountingGuard
from sandbox_server.agent.limits.memory_guard import MemoryGuard
from sandbox_server.agent.limits.open_files_guard import OpenFilesGuard, read_file_table


class Guards:
    """The guards of one agent.

    Args:
        config: the configuration of the agent.
        cgroups: the control groups that the agent can use.
        trash: deletes the folders of ended slots.
        sets_floor: whether this process may set the minimum `oom_score_adj` of slots.
    """

    def __init__(self, config: AgentConfig, cgroups: Cgroups, trash: Trash, sets_floor: bool) -> None:
        self._config = config
        self._cgroups = cgroups
        self._trash = trash
        self._sets_floor = sets_floor
        self._held_runtimes: Callable[[], Sequence[SlotRuntime]] = tuple
        self._prepared_runtimes: Callable[[], Sequence[SlotRuntime]] = tuple
        self._memory: MemoryGuard | AccountingGuard | None = None
        self._disk: DiskGuard | None = None
        self._open_files: OpenFilesGuard | None = None

    def start_guards(
        self, held_runtimes: Callable[[], Sequence[SlotRuntime]], prepared_runtimes: Callable[[], Sequence[SlotRuntime]], on_change: Callable[[], None]
    ) -> None:
        """Start the guards.

        Args:
            held_runtimes: returns the runtimes that slots have now.
            prepared_runtimes: returns the runtimes that no slot has yet.
            on_change: called when the result of `effective_limits` has changed.
        """
        self._held_runtimes, self._prepared_runtimes = held_runtimes, prepared_runtimes
        config, cgroups = self._config, self._cgroups
        if cgroups.memory_groups is not None:
            self._memory = MemoryGuard(cgroups.memory_groups, self._all_runtimes, on_change)
        else:
            self._memory = AccountingGuard(cgroups.plan, cgroups.memory_domain, self._all_runtimes)
        slot_bytes = config.limits.disk_mb * MIB if config.limits.disk_mb is not None else None
        reserve_bytes = config.disk_free_mb * MIB if config.disk_free_mb is not None else None
        self._disk = DiskGuard(config.base_dir, self._held_folders, slot_bytes, reserve_bytes, is_deleting=self._trash.is_busy)
        self._open_files = OpenFilesGuard(self._held_runtimes, lambda: read_file_table(config.machine_files))
        self._memory.start_checking()
        self._disk.start_checking()
        self._open_files.start_checking()

    async def stop_guards(self) -> None:
        """Stop the guards. Call it before the slots are ended."""
        for guard in (self._memory, self._disk, self._open_files):
            if guard is not None:
                await guard.stop_checking()

    def _all_runtimes(self) -> Sequence[SlotRuntime]:
        return [*self._held_runtimes(), *self._prepared_runtimes()]

    def _held_folders(self) -> Sequence[SlotFolders]:
        spool = os.path.join(self._config.base_dir, "spool")
        return [SlotFolders(runtime, (runtime.dirs.root, os.path.join(spool, runtime.slot_id))) for runtime in self._held_runtimes()]

    def effective_limits(self) -> dict[str, Any]:
        """Return the limits that apply to each slot now, whether the spec of the pool sets them or not."""
        groups, plan = self._cgroups.memory_groups, self._cgroups.plan
        share = groups.share_bytes() if groups is not None else plan.share_bytes(plan.slots)
        return {
            "slot_memory_mb": plan.ceiling_bytes // MIB,
            "share_memory_mb": share // MIB,
            "slots_memory_mb": plan.sandbox_limit_bytes // MIB,
            "slot_disk_mb": self._config.limits.disk_mb,
        }

    def memory_limit_enforcer(self) -> str:
        """Return what enforces the memory limit of a slot: `cgroup1`, `cgroup2`, `rlimit` or `accounting`."""
        if self._cgroups.memory != "rlimit":
            return self._cgroups.memory
        return "rlimit" if self._config.limits.memory_mb is not None else "accounting"

    def limits_not_enforced(self) -> list[str]:
        """Return sentences about the limits that this agent cannot enforce here."""
        return list(_not_enforced(self._cgroups, self._sets_floor))


def _not_enforced(cgroups: Cgroups, sets_floor: bool) -> Iterable[str]:
    if cgroups.memory_groups is None:
        why = cgroups.errors.get("memory", "no cgroup hierarchy has a memory controller here")
        yield "the memory of a slot is measured about every second and not limited at allocation (%s)" % why
        yield "not counted: %s" % NOT_COUNTED
    if not sets_floor:
        yield "a slot can lower its own oom_score_adj, because this agent lacks CAP_SYS_RESOURCE"
    if cgroups.cpu == "none":
        why = cgroups.errors.get("1cpu", "no cgroup hierarchy has a cpu controller that can be used here")
        yield "the processor is divided between sessions or threads, not between slots: a slot with many of them delays other slots and the agent (%s)" % why
    yield "disk usage is measured and not limited at the time of writing; files whose only descriptor is in flight on a socket are not counted"

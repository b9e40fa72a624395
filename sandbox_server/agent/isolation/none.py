"""The mode `none`: no isolation. The processes of slots run as the user of the agent. It is only used if the spec of the pool permits it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, Sequence

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder, ReadOnlyEntry, SlotRuntime
from sandbox_server.agent.isolation import base, init_start
from sandbox_server.agent.isolation.starter import SharedViewStarter
from sandbox_server.agent.kernel.cgroups import Cgroups


class NoIsolation:
    """The mode `none`."""

    name = "none"
    tmp_isolation = "shared"
    networks: tuple[str, ...] = ("shared",)
    caches = False
    read_only_entries = False
    slot_start = "executed"

    def __init__(self, context: base.IsolationContext, cgroups: Cgroups) -> None:
        self._starter = SharedViewStarter(context, cgroups, context.slots_dir)
        self._context = context

    async def start_runtime(
        self,
        slot_id: str,
        has_network: bool,
        reused: SlotRuntime | None = None,
        cache: CacheFolder | None = None,
        read_only: Sequence[ReadOnlyEntry] = (),
    ) -> SlotRuntime:
        """See `Isolation.start_runtime`."""
        if os.geteuid() == 0:
            raise StartFailed("a slot must not run as root, and without isolation it would; run the agent as an ordinary user")
        if not has_network:
            raise StartFailed("this mode cannot keep a slot from the network")
        if self._context.config.internet:
            raise StartFailed("this mode cannot give a slot a network of its own (network: internet); the mode bwrap can")
        if cache is not None:
            raise StartFailed("this mode cannot take a shared cache away from a slot")
        if read_only:
            raise StartFailed("this mode cannot keep a slot from changing its workspace")
        return await self._starter.start_runtime("none", slot_id, has_network, None, reused)

    async def end_runtime(self, runtime: SlotRuntime) -> dict[str, Any]:
        """See `Isolation.end_runtime`. Init kills its descendants and exits with status 0. If there are leaf groups, the kernel kills all processes in them."""
        runtime.link.close_link()
        ended = await init_start.wait_for_exit(runtime.process, base.END_TIMEOUT_S)
        if not ended:
            runtime.process.send_signal(signal.SIGKILL)
            ended = await init_start.wait_for_exit(runtime.process, base.END_TIMEOUT_S)
        left = 0
        if runtime.groups.leaves is not None:
            left = await self._kill_leaves(runtime)
        # An init that was killed, at whatever time, has not killed its descendants, which can then only be found through control groups.
        status = runtime.process.poll()
        lost_track = ended and status != 0 and runtime.groups.leaves is None
        proof: dict[str, Any] = {"init_ended": ended, "processes": left, "clean": ended and not left and not lost_track}
        if not proof["clean"]:
            how = "was killed by signal %d" % -status if status is not None and status < 0 else "failed with status %s" % status
            lost_detail = "its init %s, and the processes that it had started cannot be found" % how
            proof["detail"] = lost_detail if lost_track else "%d processes could not be ended" % left
        else:
            init_start.close_runtime_fds(runtime)
            runtime.groups.remove_groups()
        return proof

    @staticmethod
    async def _kill_leaves(runtime: SlotRuntime) -> int:
        leaves = runtime.groups.leaves
        deadline = asyncio.get_running_loop().time() + base.END_TIMEOUT_S
        while leaves is not None:
            left = leaves.kill_all()
            if not left or asyncio.get_running_loop().time() > deadline:
                return left
            await asyncio.sleep(0.005)
        return 0

    def keep_folders(self, runtime: SlotRuntime) -> bool:
        """See `Isolation.keep_folders`. Every runtime of this mode gets new folders."""
        return False

    def free_uid(self, runtime: SlotRuntime) -> None:
        """See `Isolation.free_uid`. The mode uses no user ids."""

    def remove_mode_files(self) -> None:
        """See `Isolation.remove_mode_files`. Everything that the mode creates lies in the folder of the agent."""

"""No isolation: a slot's processes are the agent's own user's, kept apart only by session and parent. Only where the pool allows it."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.execution.slot_runtime import CacheFolder, SlotRuntime
from sandbox_server.agent.isolation import base
from sandbox_server.agent.isolation.starter import Starter
from sandbox_server.agent.kernel.cgroups import Cgroups


class Nothing:
    """The mode `none`."""

    name = "none"
    places = "shared"
    networks: tuple[str, ...] = ("shared",)
    caches = False

    def __init__(self, context: base.Context, cgroups: Cgroups) -> None:
        self._starter = Starter(context, cgroups, context.slots_dir)

    async def start(self, slot_id: str, network: bool, keep: SlotRuntime | None = None, cache: CacheFolder | None = None) -> SlotRuntime:
        """See `Isolation.start`."""
        if os.geteuid() == 0:
            raise StartFailed("a slot never runs as root, and without isolation it would; run the agent as an ordinary user")
        if not network:
            raise StartFailed("cannot keep a slot from the network")
        if cache is not None:
            raise StartFailed("cannot take a cache away again")
        return await self._starter.start("none", slot_id, network, None, keep)

    async def end(self, body: SlotRuntime) -> dict[str, Any]:
        """See `Isolation.end`. Init kills what descends from it; where there are leaves, the kernel kills what is in them."""
        died_before = body.process.poll() is not None
        body.link.close()
        ended = await base.wait_exit(body.process, base.END_TIMEOUT_S)
        if not ended:
            body.process.send_signal(signal.SIGKILL)
            ended = await base.wait_exit(body.process, base.END_TIMEOUT_S)
        left = 0
        if body.groups.leaves is not None:
            left = await self._empty(body)
        # What an init leaves that did not end by its own hand can be found by its control groups, or not at all.
        lost_track = died_before and body.groups.leaves is None
        proof: dict[str, Any] = {"init_ended": ended, "processes": left, "clean": ended and not left and not lost_track}
        if not proof["clean"]:
            proof["detail"] = "its init was killed, and what it had started cannot be found" if lost_track else "%d processes could not be ended" % left
        else:
            base.close_body_fds(body)
            body.groups.remove()
        return proof

    @staticmethod
    async def _empty(body: SlotRuntime) -> int:
        leaves = body.groups.leaves
        deadline = asyncio.get_running_loop().time() + base.END_TIMEOUT_S
        while leaves is not None:
            left = leaves.kill_all()
            if not left or asyncio.get_running_loop().time() > deadline:
                return left
            await asyncio.sleep(0.005)
        return 0

    def forget(self, body: SlotRuntime) -> None:
        """See `Isolation.forget`: nothing is occupied."""

    def close(self) -> None:
        """See `Isolation.close`: everything is in the agent's own folder."""

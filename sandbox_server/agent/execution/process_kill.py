"""Ending the whole tree of exactly one run: SIGTERM, time to tidy up, SIGKILL, until nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, Protocol

from sandbox_server.agent.execution.init_client.init_watchdog import Unanswered, ask_init, end_slot
from sandbox_server.agent.execution.process_tree import ProcessTree
from sandbox_server.agent.kernel.leaf_groups import Leaf

TERM_GRACE_S = 2.0
KILL_WITHIN_S = 0.8
_FREEZE_WITHIN_S = 0.1
_FIRST_LOOK_S = 0.005
_LOOK_EVERY_S = 0.1


class _Tree(Protocol):
    async def signal(self, number: int) -> int: ...
    async def alive(self) -> int: ...


class _LeafTree:
    """The processes of a leaf; init is out of it."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf

    async def signal(self, number: int) -> int:
        if number == signal.SIGKILL:
            self._leaf.kill()
            return await self.alive()
        # Frozen, nothing in it can end and give its pid to a stranger between the list and the signal.
        self._leaf.freeze(True)
        try:
            deadline = asyncio.get_running_loop().time() + _FREEZE_WITHIN_S
            while not self._leaf.is_frozen() and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_FIRST_LOOK_S / 5)
            if self._leaf.is_frozen():
                for pid in self._leaf.pids():
                    os.kill(pid, number)
        finally:
            self._leaf.freeze(False)
        return await self.alive()

    async def alive(self) -> int:
        return len(self._leaf.pids()) if self._leaf.populated() else 0


class _ScannedTree:
    """The processes init finds: descendants, sessions, orphans that appeared while the run ran."""

    def __init__(self, run: ProcessTree) -> None:
        self._run = run

    async def signal(self, number: int) -> int:
        return await ask_init(self._run.body, {"op": "signal", "id": self._run.number, "signal": int(number)})

    async def alive(self) -> int:
        return await self.signal(0)


async def end_tree(run: ProcessTree) -> dict[str, Any]:
    """End the tree of a run, or the slot where init does not do its part.

    Returns:
        The evidence: how it was ended, and how many processes could not be.
    """
    try:
        return await _end_tree(run)
    except Unanswered as error:
        await end_slot(run.body, str(error))
        return {"signal": "SIGKILL", "slot_ended": str(error), "own_work": True}


async def _end_tree(run: ProcessTree) -> dict[str, Any]:
    tree = await _tree_of(run)
    loop = asyncio.get_running_loop()
    began = loop.time()
    left = await tree.signal(signal.SIGTERM)
    left = await _until_gone(tree, began + TERM_GRACE_S, left)
    evidence: dict[str, Any] = {"signal": "SIGTERM"}
    deadline = loop.time() + KILL_WITHIN_S
    while left and loop.time() < deadline:
        evidence["signal"] = "SIGKILL"
        left = await tree.signal(signal.SIGKILL)
        if left:
            left = await _until_gone(tree, min(deadline, loop.time() + _LOOK_EVERY_S), left)
    if left:
        evidence["processes_left"] = left
    if isinstance(tree, _ScannedTree):
        run.killed_cpu_s = run.body.link.release(run.number)
    return evidence


async def _tree_of(run: ProcessTree) -> _Tree:
    leaf, leaves = run.leaf, run.body.groups.leaves
    if leaf is None or leaves is None:
        return _ScannedTree(run)
    move_fd = leaves.move_init_out_of(leaf)
    if move_fd >= 0:
        try:
            await ask_init(run.body, {"op": "move", "id": run.number, "fds": ["cgroup"]}, [move_fd])
        except OSError:
            return _ScannedTree(run)  # init could not be asked to leave the leaf, so the leaf cannot be killed
    return _LeafTree(leaf)


async def _until_gone(tree: _Tree, deadline: float, left: int) -> int:
    loop = asyncio.get_running_loop()
    pause = _FIRST_LOOK_S
    while left:
        now = loop.time()
        if now >= deadline:
            break
        await asyncio.sleep(min(pause, deadline - now))
        pause = min(2 * pause, _LOOK_EVERY_S)
        left = await tree.alive()
    return left

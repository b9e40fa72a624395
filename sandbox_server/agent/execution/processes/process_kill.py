"""Ending exactly one process tree of a slot: SIGTERM, time to clean up, then SIGKILL until no process of the tree is left."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any, Awaitable, Callable, Protocol, Tuple

from sandbox_server.agent.execution.processes.init_watchdog import Unanswered, ask_init
from sandbox_server.agent.execution.processes.slot_kill import kill_slot_processes
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.leaf_groups import Leaf

TERM_GRACE_S = 2.0
KILL_WITHIN_S = 0.8
_FREEZE_WITHIN_S = 0.5  # Without SIGTERM, a program cannot tidy up. On a busy machine, a group is frozen only once each of its processes has run.
_FREEZE_POLL_S = 0.001
_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.1


class _Tree(Protocol):
    """One process tree. Both methods return how many of its processes are alive."""

    async def send_signal(self, signal_number: int) -> int: ...
    async def count_living(self) -> int: ...


class _LeafTree:
    """The processes in a control group. Init must have left the group."""

    def __init__(self, leaf: Leaf) -> None:
        self._leaf = leaf

    async def send_signal(self, signal_number: int) -> int:
        if signal_number == signal.SIGKILL:
            self._leaf.kill()
            return await self.count_living()
        # While the group is frozen, none of its processes can end, so no process id in the list can pass to another process before the signal is sent.
        self._leaf.freeze(True)
        try:
            deadline = asyncio.get_running_loop().time() + _FREEZE_WITHIN_S
            while not self._leaf.is_frozen() and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(_FREEZE_POLL_S)
            if self._leaf.is_frozen():
                for pid in self._leaf.pids():
                    os.kill(pid, signal_number)
        finally:
            self._leaf.freeze(False)
        return await self.count_living()

    async def count_living(self) -> int:
        return len(self._leaf.pids()) if self._leaf.populated() else 0


class _ScannedTree:
    """The processes that init finds: the descendants of the first process, those in its sessions, and orphans that appeared while it ran."""

    def __init__(self, runtime: SlotRuntime, spawn_id: int) -> None:
        self._runtime = runtime
        self._spawn_id = spawn_id

    async def send_signal(self, signal_number: int) -> int:
        return await ask_init(self._runtime, {"op": "signal", "id": self._spawn_id, "signal": int(signal_number)})

    async def count_living(self) -> int:
        return await self.send_signal(0)


async def end_process_tree(runtime: SlotRuntime, leaf: Leaf | None, spawn_id: int, term_grace_s: float = TERM_GRACE_S) -> Tuple[dict[str, Any], float]:
    """End a process tree; if init does not do its part of that, end all processes of the slot.

    Args:
        runtime: the slot runtime in which the tree runs.
        leaf: the control group of the tree, if it has one.
        spawn_id: the number of the tree on the link to init.
        term_grace_s: how long the processes have to end after SIGTERM, in seconds; 0: they get no SIGTERM.

    Returns:
        The evidence (which signal ended the tree, and how many processes are left), and the processor time in seconds that init has counted for what it killed.

    Raises:
        OSError: the request to init could not be sent.
    """
    try:
        tree = await _find_tree(runtime, leaf, spawn_id)
        evidence = await _signal_until_gone(tree, term_grace_s)
    except Unanswered as error:
        await kill_slot_processes(runtime, str(error), own_work=error.own_work)
        return {"signal": "SIGKILL", "slot_ended": str(error), **({"own_work": True} if error.own_work else {})}, 0.0
    return evidence, runtime.link.release_spawn(spawn_id) if isinstance(tree, _ScannedTree) else 0.0


async def kill_process(runtime: SlotRuntime, spawn_id: int, wait_until_over: Callable[[float], Awaitable[bool]], timeout_s: float) -> None:
    """Kill a process tree with SIGKILL and wait for the end of its first process; if that does not happen, end all processes of the slot.

    Args:
        runtime: the slot runtime in which the tree runs.
        spawn_id: the number of the tree on the link to init.
        wait_until_over: waits until the first process has ended, and returns False if that takes longer than the given number of seconds.
        timeout_s: how long to wait for that end, in seconds.

    Raises:
        OSError: the request to init could not be sent.
    """
    try:
        await _ScannedTree(runtime, spawn_id).send_signal(signal.SIGKILL)
        runtime.link.release_spawn(spawn_id)
        if not await wait_until_over(timeout_s):
            raise Unanswered("a file operation did not end within %g s of SIGKILL" % timeout_s, own_work=runtime.groups.find_usage_while_full() is None)
    except Unanswered as error:
        await kill_slot_processes(runtime, str(error), own_work=error.own_work)


async def _signal_until_gone(tree: _Tree, term_grace_s: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    began = loop.time()
    left = await tree.send_signal(signal.SIGTERM if term_grace_s else signal.SIGKILL)
    left = await _wait_until_gone(tree, began + term_grace_s, left)
    evidence: dict[str, Any] = {"signal": "SIGTERM" if term_grace_s else "SIGKILL"}
    deadline = loop.time() + KILL_WITHIN_S
    while left and loop.time() < deadline:
        evidence["signal"] = "SIGKILL"
        left = await tree.send_signal(signal.SIGKILL)
        if left:
            left = await _wait_until_gone(tree, min(deadline, loop.time() + _LONGEST_PAUSE_S), left)
    if left:
        evidence["processes_left"] = left
    return evidence


async def _find_tree(runtime: SlotRuntime, leaf: Leaf | None, spawn_id: int) -> _Tree:
    leaves = runtime.groups.leaves
    if leaf is None or leaves is None:
        return _ScannedTree(runtime, spawn_id)
    move_fd = leaves.move_init_out_of(leaf)
    if move_fd >= 0:
        try:
            await ask_init(runtime, {"op": "move", "id": spawn_id, "fds": ["cgroup"]}, [move_fd])
        except OSError:
            return _ScannedTree(runtime, spawn_id)  # init is still in the group, so the group cannot be killed as a whole
    else:
        # Init may not have started the process yet, and an empty group would look like the end of the tree. Init answers after it has started the process.
        await ask_init(runtime, {"op": "signal", "id": spawn_id, "signal": 0})
        runtime.link.release_spawn(spawn_id)
    return _LeafTree(leaf)


async def _wait_until_gone(tree: _Tree, deadline: float, left: int) -> int:
    """Wait until no process is left, or until the deadline (a time of the event loop). Returns how many are left."""
    loop = asyncio.get_running_loop()
    pause = _FIRST_PAUSE_S
    while left:
        now = loop.time()
        if now >= deadline:
            break
        await asyncio.sleep(min(pause, deadline - now))
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        left = await tree.count_living()
    return left

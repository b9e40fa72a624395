"""Ending the command of a session and, if its shell still reacts afterwards, nothing else."""

from __future__ import annotations

import asyncio
import signal
from typing import Any, Awaitable, Callable, Dict

from sandbox_server.agent.execution.sessions.command_processes import CommandProcesses

INTERRUPT_GRACE_S = 0.8  # how long the processes of a command may go on after SIGINT
REACT_WITHIN_S = 2.0  # how long it may take in all until the shell reads its next command
_ROUND_S = 0.05
_POLL_S = 0.005


async def interrupt_command(processes: CommandProcesses, wait_for_report: Callable[[float], Awaitable[bool]]) -> Dict[str, Any]:
    """Send SIGINT, then SIGKILL to the processes of a command, until the shell has reported its end and none of them is left.

    Args:
        processes: those of the command.
        wait_for_report: waits until the shell has reported the end of the command, or has ended itself; returns False if that takes longer than the given
            number of seconds.

    Returns:
        The evidence: the strongest signal that was needed, and how many processes are left.
    """
    loop = asyncio.get_running_loop()
    began = loop.time()
    evidence: Dict[str, Any] = {"signal": "SIGINT"}
    already: Dict[int, int] = {}
    is_over = False
    while not is_over and loop.time() - began < REACT_WITHIN_S:
        which = signal.SIGINT if loop.time() - began < INTERRUPT_GRACE_S else signal.SIGKILL
        living, shells = await loop.run_in_executor(None, processes.send_signal, int(which), already)
        if living and which == signal.SIGKILL:
            evidence["signal"] = "SIGKILL"
        if not shells:
            break
        is_over = await wait_for_report(_ROUND_S)
    left = await loop.run_in_executor(None, processes.kill_living)
    if left:
        evidence["signal"] = "SIGKILL"
    while left and loop.time() - began < REACT_WITHIN_S:
        await asyncio.sleep(_POLL_S)
        left = await loop.run_in_executor(None, processes.kill_living)
    if left:
        evidence["processes_left"] = left
    return evidence

"""Proves, for pools that require it, that a stateful shell and the tool `tmux` work in a slot of this agent."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any, Mapping

from sandbox_server.agent.execution.call_spec import DEFAULT_OUTPUT_LIMIT_BYTES, CallSpec
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.slots.runtimes import RuntimePool
from sandbox_server.agent.slots.slots import READY, AgentSlot

_SHELL, _TERMINAL = "bash_stateful", "tmux"
_PROBE_WITHIN_S = 5.0  # for each of three calls, so that the agent listens before its backend gives it up
_MAX_DETAIL_CHARS = 500


async def probe_stateful_tools(runtime: SlotRuntime, runtimes: RuntimePool) -> Mapping[str, str]:
    """Run a command in a session, and start a terminal.

    Args:
        runtime: a slot runtime that no slot has. It is ended afterwards, because the tools leave files in it.
        runtimes: ends it.

    Returns:
        For each tool that does not work, the sentence that says why.
    """
    slot = AgentSlot("0", runtimes, lambda _: None)
    slot.adopt_runtime(runtime)
    try:
        if slot.state != READY:
            return dict.fromkeys((_SHELL, _TERMINAL), "the slot for the probe has ended: %s" % slot.detail)
        problems = {_SHELL: await _probe_shell(slot), _TERMINAL: await _probe_terminal(slot)}
        return {tool: problem for tool, problem in problems.items() if problem}
    finally:
        spool_folder = slot.lease.spool_folder
        await slot.end_slot()
        runtimes.trash.discard_folder(spool_folder)


async def _probe_shell(slot: AgentSlot) -> str:
    """Return why a session does not keep a variable for its next command; empty if it does."""
    for command in ("kept=by-the-shell", '[ "$kept" = by-the-shell ]'):
        outcome = await _run(slot, _SHELL, {"command": command})
        if outcome.exit_code != 0:
            return _describe(outcome)
    return ""


async def _probe_terminal(slot: AgentSlot) -> str:
    """Return why no pane can be started; empty if one can."""
    outcome = await _run(slot, _TERMINAL, {"action": "capture"})
    return "" if outcome.tool_ok and outcome.metadata.get("terminal") == "started" else _describe(outcome)


async def _run(slot: AgentSlot, tool: str, args: Mapping[str, Any]) -> CallOutcome:
    done: asyncio.Future[CallOutcome] = slot.loop.create_future()
    spec = CallSpec(secrets.token_hex(8), tool, args, _PROBE_WITHIN_S, None, DEFAULT_OUTPUT_LIMIT_BYTES, False)
    slot.submit_call(spec, done.set_result)
    return await done


def _describe(outcome: CallOutcome) -> str:
    detail = outcome.error or "its probe ended as %s with exit code %s" % (outcome.reason, outcome.exit_code)
    return detail[:_MAX_DETAIL_CHARS]

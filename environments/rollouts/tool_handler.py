"""Executes the tool calls of a model in the slot of its trajectory, and remembers what decides whether the trajectory may be scored."""

from __future__ import annotations

from collections import Counter
from typing import Any

from env_client import ExecutionResult, Fault, Reason, SandboxError, SlotTools, render_tool_reply
from environments.agent_loop import AgentResult, LoopEnd
from environments.conversation.tool_replies import ToolReply, error_content
from environments.rollouts.exec_tool import RolloutFault
from environments.rollouts.recordings import find_recording

#: Ends of a call after which the slot is gone.
_SLOT_GONE = frozenset({Reason.LEASE_LOST, Reason.SANDBOX_LOST})


class SlotToolHandler:
    """The tool handler of one trajectory.

    Args:
        tools: the tools of the slot.
    """

    def __init__(self, tools: SlotTools) -> None:
        self._tools = tools
        #: How the first call ended whose fault is `ambiguous`; None as long as there is none.
        self.ambiguous: RolloutFault | None = None
        #: What ended the rollout through no fault of the model; None as long as nothing did.
        self.fault: RolloutFault | None = None
        #: Whether it is proven that the model's commands ended its own slot.
        self.lost_by_policy = False
        #: How many calls ended with each fault and reason, such as `("policy", "timeout")`. Calls without fault are not counted.
        self.faults: Counter[tuple[str, str]] = Counter()
        #: The name of the recording of the terminal that the model has used; None if it has used none.
        self.recording: str | None = None

    async def __call__(self, tool: str, args: dict[str, Any], task_id: str, /) -> ToolReply:
        """Execute one call. A reply with the fault `infra` ends the rollout."""
        try:
            result = await self._tools.run_model_call(tool, args)
        except SandboxError as error:
            return self._end_rollout(RolloutFault.from_error(error))
        self.recording = find_recording(result.metadata) or self.recording
        if result.fault != Fault.NONE:
            self.faults[result.fault, result.reason] += 1
        if result.reason in _SLOT_GONE and result.fault == Fault.POLICY:
            self.lost_by_policy = True
            return _infra_reply(result.error, result.reason)
        if result.fault == Fault.INFRA or result.reason in _SLOT_GONE or result.reason == Reason.CANCELLED:
            fault = "ambiguous" if result.fault == Fault.AMBIGUOUS else "infra"
            return self._end_rollout(RolloutFault(f"{tool}: {result.error}", reason=result.reason, fault=fault))
        if result.fault == Fault.AMBIGUOUS and self.ambiguous is None:
            self.ambiguous = RolloutFault(f"{tool}: {result.error}", reason=result.reason, fault="ambiguous")
        return reply_of_result(tool, result)

    def _end_rollout(self, fault: RolloutFault) -> ToolReply:
        self.fault = self.fault or fault
        return _infra_reply(fault.message, fault.reason)


def has_policy_fault(result: AgentResult) -> bool:
    """Return whether a call of a rollout failed or was refused because of the model."""
    return any(call.reply.fault == "policy" for call in result.calls)


def find_rollout_fault(result: AgentResult, handler: SlotToolHandler) -> RolloutFault | None:
    """Return the fault because of which a rollout must not be scored, or None.

    An ambiguous fault counts as one of the infrastructure, unless a fault of the policy was found in the same rollout. A slot that the commands of the model
    have ended, which is proven, is no fault of ours.

    Args:
        result: what the agent loop returned.
        handler: the tool handler of the rollout.
    """
    if handler.fault is not None:
        return handler.fault
    if handler.lost_by_policy:
        return None
    if result.end is LoopEnd.INFRA_FAULT:  # the handler itself raised an exception
        call = next(call for call in result.calls if call.reply.fault == "infra")
        return RolloutFault(f"{call.tool}: {call.reply.error}", reason=call.reply.reason)
    return None if has_policy_fault(result) else handler.ambiguous


def reply_of_result(tool: str, result: ExecutionResult) -> ToolReply:
    """Return what the agent loop gets for the result of a call. A command that ends by itself is no error, whatever its exit code."""
    return ToolReply(render_tool_reply(tool, result), ok=not result.error, error=result.error, fault=result.fault, reason=result.reason)


def _infra_reply(error: str, reason: str) -> ToolReply:
    """Return the reply that ends the rollout in the agent loop."""
    return ToolReply(error_content(error), ok=False, error=error, fault="infra", reason=reason)

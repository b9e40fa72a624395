"""The seam between the agent loop and the tools: a handler that executes a call and returns a reply."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

from environments.tool_call_parsers.arguments import InvalidJson, decode_json, encode_json

logger = logging.getLogger(__name__)

#: The reason of a reply whose handler raised an exception.
HANDLER_RAISED = "handler_raised"


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What a tool call came to.

    Args:
        content: the JSON text for the model.
        ok: whether the call did what it was asked to do.
        error: one sentence on why it did not; empty if it did.
        fault: who is to blame: `none`, `policy`, `infra` or `ambiguous`.
        reason: how the call ended, such as `exit` or `timeout`; empty if the tool did not say.
    """

    content: str
    ok: bool
    error: str = ""
    fault: str = "none"
    reason: str = ""


class ToolHandler(Protocol):
    """Executes the tool calls of a trajectory. A plain asynchronous function that returns the JSON text for the model is accepted, too."""

    async def __call__(self, tool: str, args: dict[str, Any], task_id: str, /) -> ToolReply | str:
        """Execute one call.

        Args:
            tool: the name of the tool.
            args: its arguments.
            task_id: the trajectory.
        """


def error_content(error: str) -> str:
    """Return the JSON text that tells the model about an error."""
    return encode_json({"error": error})


async def execute_call(handler: ToolHandler, tool: str, args: dict[str, Any], task_id: str) -> ToolReply:
    """Execute a call with a handler.

    Args:
        handler: the handler.
        tool: the name of the tool.
        args: its arguments.
        task_id: the trajectory.

    Returns:
        The reply. A text counts as an error if it is a JSON object with a member `error` that is not empty.
        An exception of the handler is a fault of the infrastructure, because a handler reports what the model did wrong in its reply.
    """
    try:
        reply = await handler(tool, args, task_id)
    except Exception as error:  # each handler has exceptions of its own
        logger.exception("The tool %s of trajectory %s raised an exception", tool, task_id)
        text = f"The tool could not be executed: {type(error).__name__}: {error}"
        return ToolReply(error_content(text), ok=False, error=text, fault="infra", reason=HANDLER_RAISED)
    return reply if isinstance(reply, ToolReply) else _reply_of_text(reply)


def _reply_of_text(text: str) -> ToolReply:
    try:
        value = decode_json(text)
    except InvalidJson:
        return ToolReply(text, ok=True)
    error = value.get("error") if isinstance(value, dict) else None
    return ToolReply(text, ok=not error, error=str(error) if error else "")

"""A model in the process that plays written answers."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from environments.agent_loop import ToolReply

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("terminal", "read_file", "terminal_stateful")
]


def call(name: str, arguments: Any, call_id: str = "call_1") -> dict[str, Any]:
    """A tool call of an answer; arguments that are no text are encoded."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def response(content: str | None = None, *calls: dict[str, Any], finish_reason: str = "stop", **fields: Any) -> dict[str, Any]:
    """A response with one choice."""
    return {"choices": [{"message": {"role": "assistant", "content": content, "tool_calls": list(calls), **fields}, "finish_reason": finish_reason}]}


def as_objects(value: Any) -> Any:
    """The same response as objects with attributes, as clients of OpenAI return it."""
    if isinstance(value, dict):
        return SimpleNamespace(**{key: as_objects(member) for key, member in value.items()})
    return [as_objects(member) for member in value] if isinstance(value, list) else value


class ScriptedModel:
    """Answers each request with the next response, and keeps the requests as they were. An exception is raised."""

    def __init__(self, *responses: Any) -> None:
        self._responses = list(responses)
        self.requests: list[dict[str, Any]] = []

    async def chat_completion(self, **request: Any) -> Any:
        self.requests.append(copy.deepcopy(request))
        answer = self._responses.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


class RecordingTools:
    """Replies to each call with the next reply, and keeps the calls. Without replies, each call succeeds."""

    def __init__(self, *replies: Any) -> None:
        self._replies = list(replies)
        self.calls: list[tuple[str, dict[str, Any], str]] = []

    async def __call__(self, tool: str, args: Any, task_id: str, /) -> ToolReply | str:
        self.calls.append((tool, dict(args), task_id))
        reply = self._replies.pop(0) if self._replies else ToolReply('{"output": "ok"}', ok=True, reason="exit")
        if isinstance(reply, BaseException):
            raise reply
        return reply


def contents(messages: Sequence[dict[str, Any]], role: str) -> list[str]:
    """The contents of the messages of a role."""
    return [message["content"] for message in messages if message["role"] == role]

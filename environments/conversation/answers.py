"""The answers of model servers, read alike from objects (clients of OpenAI) and from dictionaries (JSON, and the tool calls of atroposlib)."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.tool_call_parsers.arguments import encode_json

#: An OpenAI-style message.
Message = dict[str, Any]


#: The most tool calls of one answer that are read. No context of a model has room for more.
MAX_READ_CALLS = 65_536


class NoAnswer(Exception):
    """The response of the model server has no message, or one of a wrong form. That is a mistake of the server, and not of the model."""


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A tool call that a model asks for.

    Args:
        call_id: the identifier, which the reply repeats.
        name: the tool.
        arguments: the JSON text of the arguments, as the model wrote it.
    """

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of a model.

    Args:
        content: the text; empty if there is none.
        calls: the tool calls in order.
        reasoning: the reasoning that the server returned beside the text; None if it returned none.
        finish_reason: why the generation ended, such as `stop` or `length`; empty if the server did not say.
    """

    content: str
    calls: tuple[RequestedCall, ...]
    reasoning: str | None
    finish_reason: str

    def as_message(self) -> Message:
        """Return the answer as a message of the conversation. Its content is always a string."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:  # chat templates write the reasoning of the latest turns
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
            ]
        return message


def read_answer(response: object) -> Answer:
    """Read the first choice of a response to a chat completion.

    Raises:
        NoAnswer: the response has no choice, its choice has no message, or a member of the message has a wrong type.
    """
    choices = _member(response, "choices")
    message = _member(choices[0], "message") if isinstance(choices, Sequence) and choices else None
    if message is None:
        raise NoAnswer("the response has no message")
    if isinstance(message, str | int | float | list):
        raise NoAnswer(f"its message is {type(message).__name__}, and not an object")
    calls = _member(message, "tool_calls") or ()
    if not isinstance(calls, list | tuple) or len(calls) > MAX_READ_CALLS:
        raise NoAnswer(f"its tool_calls are not a list of at most {MAX_READ_CALLS} calls")
    return Answer(
        content=_text(_member(message, "content")),
        calls=tuple(_read_call(call) for call in calls),
        reasoning=_read_reasoning(message),
        finish_reason=str(_member(choices[0], "finish_reason") or ""),
    )


def _member(value: object, name: str) -> Any:
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _text(content: object) -> str:
    """Return a content as text. Some servers return a list of parts.

    Raises:
        NoAnswer: it is neither.
    """
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        return "".join(part if isinstance(part, str) else str(_member(part, "text") or "") for part in content)
    if content is None:
        return ""
    raise NoAnswer(f"its content is {type(content).__name__}, and not text")


def _read_call(call: object) -> RequestedCall:
    """Return a tool call.

    Raises:
        NoAnswer: it has no function, or a function whose name is not text.
    """
    function = _member(call, "function")
    if function is None or not isinstance(_member(function, "name"), str | None):
        raise NoAnswer("one of its tool_calls has no function with a name")
    arguments = _member(function, "arguments")
    if not isinstance(arguments, str):
        arguments = "" if arguments is None else encode_json(arguments)
    call_id = _member(call, "id")
    return RequestedCall(str(call_id) if call_id else f"call_{uuid.uuid4().hex[:24]}", str(_member(function, "name") or ""), arguments)


def _read_reasoning(message: object) -> str | None:
    """Return the reasoning from whichever of the three fields the server uses."""
    for name in ("reasoning_content", "reasoning"):
        text = _member(message, name)
        if isinstance(text, str) and text:
            return text
    details = _member(message, "reasoning_details")
    if not isinstance(details, Sequence):
        return None
    texts = [_member(detail, "text") or _member(detail, "summary") for detail in details]
    return "\n".join(text for text in texts if isinstance(text, str) and text) or None

"""From OpenAI-style messages to a conversation in ShareGPT form: the roles `system`, `human`, `gpt` and `tool`, with tool calls in the Hermes format."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from environments.conversation.answers import Message
from environments.tool_call_parsers.arguments import InvalidJson, decode_json, encode_json
from environments.tool_call_parsers.base import ParsedCall
from environments.tool_call_parsers.hermes import HermesParser

_SYSTEM_PROMPT = """You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. You may call one or more \
functions to assist with the user query. Do not make assumptions about what values to plug into functions.
<tools>
{tools}
</tools>
For each function call, return a JSON object with the name and the arguments of the function within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-object>}}
</tool_call>"""


def describe_tools(tools: Iterable[Mapping[str, Any]]) -> str:
    """Return the system message of a conversation. It describes the tools, because the form has no other place for them.

    Args:
        tools: the OpenAI-style schemas of the tools that the model could call.
    """
    return _SYSTEM_PROMPT.format(tools="\n".join(map(encode_json, tools)))


def to_conversation(messages: Sequence[Message], system_message: str) -> list[dict[str, str]]:
    """Convert the messages of a rollout. A system message of the rollout is left out: it is the ephemeral one.

    Args:
        messages: the OpenAI-style messages of the rollout.
        system_message: the result of `describe_tools`.
    """
    turns = [_turn("system", system_message)]
    replies: list[str] = []
    for message in messages:
        if message["role"] == "tool":  # the replies to the calls of one answer are one turn
            replies.append(_tool_response(message))
            continue
        if replies:
            turns.append(_turn("tool", "\n".join(replies)))
            replies = []
        if message["role"] == "user":
            turns.append(_turn("human", message["content"]))
        elif message["role"] == "assistant":
            turns.append(_turn("gpt", _answer_text(message)))
    if replies:
        turns.append(_turn("tool", "\n".join(replies)))
    return turns


def _turn(speaker: str, value: str) -> dict[str, str]:
    return {"from": speaker, "value": value}


def _answer_text(message: Message) -> str:
    calls = [
        ParsedCall(call["id"], call["function"]["name"], call["function"]["arguments"] if call["function"]["arguments"].strip() else "{}")
        for call in message.get("tool_calls", ())
    ]
    text = HermesParser().format_message(message["content"], calls)
    reasoning = message.get("reasoning_content")
    return f"<think>\n{reasoning}\n</think>\n{text}" if reasoning else text


def _tool_response(message: Message) -> str:
    content = message["content"]
    try:
        decode_json(content)
    except InvalidJson:
        content = encode_json(content)
    return f'<tool_response>\n{{"name": {encode_json(message["name"])}, "content": {content}}}\n</tool_response>'

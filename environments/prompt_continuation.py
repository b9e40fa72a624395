"""The next prompt of a conversation, as the continuation of the text that the model has seen and written.

Many chat templates change earlier messages of the model: they strip whitespace, or leave out reasoning. A prompt that such a template renders does not
start with the text of the conversation so far, and atroposlib's `ManagedServer` then silently begins a second sequence of tokens. Here the template renders
only what comes after the model's latest message.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: Renders a conversation with the chat template, up to where the model begins to write.
PromptRenderer = Callable[[Sequence[Mapping[str, Any]]], str]


def continue_prompt(text: str, messages: Sequence[Mapping[str, Any]], render: PromptRenderer, end_of_turn: Sequence[str]) -> str | None:
    """Return the next prompt of a conversation.

    Args:
        text: the latest prompt and what the model wrote after it, with the token that ends the turn if the model wrote it.
        messages: the conversation, in which the model's messages have their raw text as content, without the token that ends the turn.
        render: renders messages with the chat template.
        end_of_turn: the texts of the tokens that end a turn.

    Returns:
        `text` and what the chat template writes after the model's latest message, or None if `text` does not end with that message.
    """
    latest = max((index for index, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    if latest < 0:
        return None
    ending = next((token for token in end_of_turn if token and text.endswith(token)), "")
    if not text.removesuffix(ending).endswith(str(messages[latest].get("content") or "")):
        return None
    placeholder = f"placeholder-{secrets.token_hex(16)}"
    rendered = render([*messages[:latest], {"role": "assistant", "content": placeholder}, *messages[latest + 1 :]])
    _, found, suffix = rendered.rpartition(placeholder)
    return text + suffix.removeprefix(ending) if found else None

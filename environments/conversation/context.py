"""Keeps a conversation within the context of the model, on a copy: first old tool results are shortened, then the oldest messages left out."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from environments.conversation.answers import Message

#: How many messages at the beginning (the task) and at the end (the current work) stay as they are.
KEEP_FIRST = 2
KEEP_LAST = 6
#: How much of a shortened tool result is left at its beginning, and as much at its end.
_KEPT_CHARACTERS = 400

#: Counts the tokens of a conversation.
TokenCounter = Callable[[Sequence[Message]], int]


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of a conversation without a tokenizer: one for every three bytes of text, and a few for each message."""
    texts = [str(message.get(member) or "") for message in messages for member in ("content", "tool_calls")]
    return sum(len(text.encode(errors="replace")) // 3 for text in texts) + 8 * len(messages)


def shorten_context(messages: Sequence[Message], max_tokens: int, count_tokens: TokenCounter) -> list[Message] | None:
    """Return a copy of a conversation that fits into the context of the model.

    The first two and the last six messages stay. Between them, tool results are shortened; if that is not enough, the oldest messages are left out, and
    an assistant message together with the replies to its tool calls.

    Args:
        messages: the conversation, which is not changed.
        max_tokens: the most tokens that the copy may have.
        count_tokens: counts the tokens of a conversation.

    Returns:
        The copy, or None if the messages that stay are too long by themselves.
    """
    if count_tokens(messages) <= max_tokens:
        return list(messages)
    end = len(messages) - KEEP_LAST
    shortened = [_shorten_tool_result(message) if KEEP_FIRST <= index < end else message for index, message in enumerate(messages)]
    removable = [group for group in _groups(messages) if group.start >= KEEP_FIRST and group.stop <= end]

    def without_oldest(count: int) -> list[Message]:
        left_out = {index for group in removable[:count] for index in group}
        return [message for index, message in enumerate(shortened) if index not in left_out]

    counts = range(len(removable) + 1)
    fewest = bisect_left(counts, True, key=lambda count: count_tokens(without_oldest(count)) <= max_tokens)
    return without_oldest(fewest) if fewest in counts else None


def _groups(messages: Sequence[Message]) -> list[range]:
    """Divide a conversation into what can be left out together: a message, and the tool results that follow it."""
    starts = [index for index, message in enumerate(messages) if message.get("role") != "tool" or index == 0]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], len(messages)], strict=True)]


def _shorten_tool_result(message: Message) -> Message:
    content = message.get("content")
    if message.get("role") != "tool" or not isinstance(content, str) or len(content) <= 3 * _KEPT_CHARACTERS:
        return message
    left_out = len(content) - 2 * _KEPT_CHARACTERS
    return {**message, "content": f"{content[:_KEPT_CHARACTERS]}\n… {left_out} characters left out …\n{content[-_KEPT_CHARACTERS:]}"}

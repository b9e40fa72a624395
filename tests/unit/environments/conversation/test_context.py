"""The copy of a conversation that fits into the context of a model."""

from __future__ import annotations

from typing import Any

import pytest

from environments.conversation.context import estimate_tokens, shorten_context

LONG = "a" * 5000


def count(messages: Any) -> int:
    return sum(len(message["content"]) for message in messages)


def turn(number: int, *results: str) -> list[dict[str, Any]]:
    calls = [{"id": f"{number}-{index}"} for index in range(len(results))]
    return [
        {"role": "assistant", "content": f"turn {number}", "tool_calls": calls},
        *({"role": "tool", "tool_call_id": f"{number}-{index}", "content": text} for index, text in enumerate(results)),
    ]


TASK = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
CONVERSATION = [*TASK, *turn(1, LONG), *turn(2, LONG, "short"), *turn(3, LONG), *turn(4, LONG), *turn(5, LONG), *turn(6, LONG)]


def test_a_conversation_that_fits_is_copied() -> None:
    copied = shorten_context(CONVERSATION, 10**6, count)

    assert copied == CONVERSATION
    assert copied is not CONVERSATION


def test_old_tool_results_are_shortened_first() -> None:
    shortened = shorten_context(CONVERSATION, 25_000, count)

    assert shortened is not None
    assert len(shortened) == len(CONVERSATION)
    assert shortened[:2] == TASK
    assert shortened[-6:] == CONVERSATION[-6:]
    assert [len(message["content"]) < 1000 for message in shortened if message["role"] == "tool"] == [True, True, True, True, False, False, False]
    assert shortened[3]["content"] == f"{'a' * 400}\n… 4200 characters left out …\n{'a' * 400}"
    assert CONVERSATION[3]["content"] == LONG


def test_then_the_oldest_messages_are_left_out_with_their_replies() -> None:
    shortened = shorten_context(CONVERSATION, 16_500, count)

    assert shortened is not None
    assert count(shortened) <= 16_500
    assert shortened[:2] == TASK
    assert [message["content"] for message in shortened if message["role"] == "assistant"] == [f"turn {number}" for number in (3, 4, 5, 6)]
    assert shortened[-6:] == CONVERSATION[-6:]


@pytest.mark.parametrize("most", range(1000, 26_000, 700))
def test_no_reply_stands_without_its_call(most: int) -> None:
    conversation = [*CONVERSATION, {"role": "user", "content": "go on"}, *turn(7, "a", "b", LONG, "d", "e")]

    shortened = shorten_context(conversation, most, count)

    if shortened is None:
        assert most < 16_500
        return
    assert count(shortened) <= most
    called = {call["id"] for message in shortened for call in message.get("tool_calls", ())}
    replied = {message["tool_call_id"] for message in shortened if message["role"] == "tool"}
    assert called == replied


def test_messages_that_stay_and_are_too_long_cannot_be_shortened() -> None:
    assert shorten_context(CONVERSATION, 14_000, count) is None
    assert shorten_context([{"role": "user", "content": LONG}], 100, count) is None
    assert shorten_context([], 100, count) == []


def test_tokens_are_estimated_from_bytes() -> None:
    assert estimate_tokens([{"role": "user", "content": "abc" * 10}]) == 18
    assert estimate_tokens([{"role": "user", "content": "中" * 10}, {"role": "tool", "content": None}]) == 26

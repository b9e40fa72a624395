"""From scored trajectories to what a trainer gets: tokens, masks, scores, messages and, where the model server returns them, log probabilities."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from environments.conversation.answers import Message
from environments.rollouts.trajectory import TrajectoryRecord


def text_messages(messages: Sequence[Message]) -> list[Message]:
    """Return a conversation in which every message has a role and a text, as the trainer's API requires."""
    return [{**message, "role": str(message["role"]), "content": str(message.get("content") or "")} for message in messages]


def make_group(records: Sequence[TrajectoryRecord], max_tokens: int) -> tuple[dict[str, Any], int]:
    """Return the scored group, as atroposlib sends and writes it, and how many of its trajectories were cut.

    Args:
        records: the scored trajectories, with their tokens.
        max_tokens: the most tokens of a trajectory. Longer ones are cut at their end.
    """
    whole = [record.tokens for record in records if record.tokens is not None]
    assert len(whole) == len(records)
    tokens = [one.cut(max_tokens) for one in whole]
    group: dict[str, Any] = {
        "tokens": [one.tokens for one in tokens],
        "masks": [one.masks for one in tokens],
        "scores": [record.reward for record in records],
        "messages": [text_messages(record.result.messages) if record.result else [] for record in records],
    }
    if all(one.logprobs is not None for one in tokens):
        group["inference_logprobs"] = [one.logprobs for one in tokens]
    return group, sum(len(one.tokens) > max_tokens for one in whole)


def describe_recordings(records: Sequence[TrajectoryRecord]) -> list[dict[str, str]]:
    """Return the `path` of the recording of each trajectory's terminal, and the `error` if it could not be kept. Both are empty if there is none."""
    kept = [record.recording for record in records]
    return [{"path": str(one.path or "") if one else "", "error": one.error if one else ""} for one in kept]


def render_conversation(messages: Sequence[Message]) -> str:
    """Return a conversation as readable text, with its calls and results."""
    return "\n\n".join(itertools.chain.from_iterable(_render_message(message) for message in messages))


def _render_message(message: Message) -> list[str]:
    role = str(message.get("role", ""))
    head = f"[tool result of {message['name']}]" if role == "tool" and message.get("name") else f"[{role}]"
    parts = []
    if message.get("reasoning_content"):
        parts.append(f"[{role} reasoning]\n{message['reasoning_content']}")
    if message.get("content") or not message.get("tool_calls"):
        parts.append(f"{head}\n{message.get('content') or ''}")
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        parts.append(f"[tool call] {function.get('name')}({function.get('arguments')})")
    return parts

"""The tokens of a trajectory: exact ones from a managed server, or those of its messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.conversation.answers import Message

#: The mask of a token that the model has not written, and on which it is not trained.
NOT_TRAINED = -100
#: The log probability that atroposlib gives to tokens that the model has not written. No probability has it.
NO_LOGPROB = 1.0

#: Returns the tokens and the masks of a conversation, as `tokenize_for_trainer` does.
ConversationTokenizer = Callable[[Sequence[Message]], Mapping[str, Any]]


class TokensUnusable(Exception):
    """The tokens of a trajectory cannot be had, or are not what the model saw and wrote. The trajectory must not be used.

    Args:
        message: one sentence that says what happened.
        reason: a short name of the cause, for statistics.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class TrajectoryTokens:
    """The tokens of one trajectory.

    Args:
        tokens: what the model saw and wrote.
        masks: the tokens that it wrote, and `NOT_TRAINED` for all others.
        logprobs: the log probabilities of the tokens that it wrote, and `NO_LOGPROB` for all others; None if the model server returns none.
    """

    tokens: list[int]
    masks: list[int]
    logprobs: list[float] | None = None

    def cut(self, max_tokens: int) -> TrajectoryTokens:
        """Return the tokens without those at the end that exceed a length."""
        if len(self.tokens) <= max_tokens:
            return self
        return TrajectoryTokens(self.tokens[:max_tokens], self.masks[:max_tokens], None if self.logprobs is None else self.logprobs[:max_tokens])


def tokens_of_state(state: Mapping[str, Any] | None) -> TrajectoryTokens:
    """Return the tokens of a trajectory from the state of a managed server.

    Raises:
        TokensUnusable: the state has not exactly one sequence, or lacks log probabilities of tokens that the model wrote. That is a mistake of ours or of the
            model server: the tokens would not be what the model saw and wrote.
    """
    nodes: Sequence[Any] = (state or {}).get("nodes") or ()
    if len(nodes) != 1:
        raise TokensUnusable(
            f"the conversation has {len(nodes)} sequences of tokens instead of one: a prompt did not continue what the model saw and wrote before; "
            "compare the tool_call_parser and the chat template of tokenizer_name with the model",
            reason="split_sequence",
        )
    node = nodes[0]
    tokens, masks = list(node.tokens), list(node.masked_tokens)
    try:
        logprobs = [float(value) for value in node.logprobs]
    except (TypeError, ValueError) as error:
        raise TokensUnusable(f"the model server returned a log probability that is no number: {error}", reason="wrong_logprobs") from error
    if not all(map(math.isfinite, logprobs)):
        raise TokensUnusable("the model server returned a log probability that is not finite", reason="wrong_logprobs")
    if not len(tokens) == len(masks) == len(logprobs):
        raise TokensUnusable(f"the model server returned {len(logprobs)} log probabilities for {len(tokens)} tokens", reason="missing_logprobs")
    missing = sum(mask != NOT_TRAINED and logprob > 0 for mask, logprob in zip(masks, logprobs, strict=True))
    if missing:
        raise TokensUnusable(f"the model server returned no log probability for {missing} tokens that the model wrote", reason="missing_logprobs")
    return TrajectoryTokens(tokens, masks, logprobs)


def tokens_of_messages(messages: Sequence[Message], tokenize: ConversationTokenizer) -> TrajectoryTokens:
    """Return the tokens of a conversation, by tokenizing its messages.

    Args:
        messages: the conversation.
        tokenize: returns tokens and masks.
    """
    tokenized = tokenize(messages)
    return TrajectoryTokens(list(tokenized["tokens"]), list(tokenized["masks"]))

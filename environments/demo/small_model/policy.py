"""A policy that chooses one of a few commands for a prompt: a softmax over the commands, linear in the words of the prompt."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from environments.demo.tokenizer import START_OF_TURN, TextTokenizer
from environments.tool_call_parsers import ParsedCall, get_parser

Vector = NDArray[np.float64]
#: How many numbers describe a prompt.
FEATURE_COUNT = 64
_USER_MESSAGE = re.compile(re.escape(f"{START_OF_TURN}user\n") + r"(.*?)<\|", re.DOTALL)


@dataclass(frozen=True, slots=True)
class WrittenCommand:
    """A command as the model writes it.

    Args:
        command: the shell command.
        text: the tool call.
        tokens: the tokens of the text, with the one that ends the turn.
    """

    command: str
    text: str
    tokens: tuple[int, ...]


class CommandPolicy:
    """Chooses a command for a prompt. At the beginning, every command has the same probability.

    Args:
        commands: the commands, each of which must be different.
        tokenizer: the tokenizer of the model.
    """

    def __init__(self, commands: Sequence[str], tokenizer: TextTokenizer) -> None:
        if len(set(commands)) != len(commands) or not commands:
            raise ValueError("The commands of the policy must be different, and at least one.")
        self.commands = tuple(_write_command(command, tokenizer) for command in commands)
        #: One row for each command. A trainer replaces it, and the server of the policy uses it from then on.
        self.weights: Vector = np.zeros((len(self.commands), FEATURE_COUNT))

    def log_probabilities(self, features: Vector) -> Vector:
        """Return the log probability of each command.

        Args:
            features: the features of the prompt.
        """
        logits = self.weights @ features
        shifted: Vector = logits - logits.max()
        logprobs: Vector = shifted - np.log(np.exp(shifted).sum())
        return logprobs

    def token_logprobs(self, choice: int, features: Vector) -> list[float]:
        """Return the log probability of each token of a written command: 0 for a token that all commands have that begin alike.

        Args:
            choice: the number of the command.
            features: the features of the prompt.

        Returns:
            The log probabilities. Their sum is that of the command.
        """
        probabilities = np.exp(self.log_probabilities(features))
        alive = list(range(len(self.commands)))
        logprobs = []
        for index, token in enumerate(self.commands[choice].tokens):
            still = [number for number in alive if self.commands[number].tokens[index : index + 1] == (token,)]
            logprobs.append(0.0 if len(still) == len(alive) else float(np.log(probabilities[still].sum() / probabilities[alive].sum())))
            alive = still
        return logprobs

    def find_choice(self, tokens: Sequence[int]) -> int:
        """Return which command the tokens begin with.

        Args:
            tokens: the tokens that the model wrote in a rollout.

        Raises:
            ValueError: they begin with none of the commands.
        """
        for number, written in enumerate(self.commands):
            if tuple(tokens[: len(written.tokens)]) == written.tokens:
                return number
        raise ValueError("The tokens begin with none of the commands of the policy: another model has written them, or the rollout was cut.")


def _write_command(command: str, tokenizer: TextTokenizer) -> WrittenCommand:
    call = ParsedCall("call", "terminal", json.dumps({"command": command}))
    text = get_parser("hermes").format_message("", [call])
    return WrittenCommand(command, text, (*tokenizer.encode(text), tokenizer.end_of_turn_id))


def find_user_message(prompt: str) -> str:
    """Return the first message of the user in a prompt that is written with the ChatML format of `environments.demo.tokenizer`.

    Raises:
        ValueError: the prompt has none.
    """
    found = _USER_MESSAGE.search(prompt)
    if found is None:
        raise ValueError("The prompt has no message of the user in the ChatML format.")
    return found[1]


def describe_message(message: str) -> Vector:
    """Return the features of a message: how often the words with each hash occur, as a vector of length 1."""
    features: Vector = np.zeros(FEATURE_COUNT)
    for word in re.findall(r"\w{4,}", message.lower()):
        features[zlib.crc32(word.encode()) % FEATURE_COUNT] += 1
    return features / max(1.0, float(np.linalg.norm(features)))

"""The server of the small model: `/generate` as vLLM answers it to atroposlib 0.4.0, with the log probabilities of a policy that a trainer changes."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from environments.demo.application import Event, Receive, Send, read_body, send_json
from environments.demo.small_model.policy import CommandPolicy, describe_message, find_user_message
from environments.demo.tokenizer import START_OF_TURN, TextTokenizer
from environments.demo.wire import BadRequest, VllmRequest, read_generate_request

#: What the model writes when it has seen the result of its command.
CLOSING_TEXT = "Done."
_TOOL_MESSAGE = f"{START_OF_TURN}tool\n"


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """An answer of the model.

    Args:
        text: its text.
        tokens: its tokens, with the one that ends the turn.
        logprobs: the log probability of each token.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: list[float]


class PolicyApplication:
    """Answers requests of `/generate`: the first answer of a conversation is a command that the policy samples, and the second one ends the conversation.

    Args:
        policy: the policy. Each request uses the weights that it has at that time.
        tokenizer: decodes the prompts.
        seed: the seed of the samples. Each prompt has a random generator of its own, so that the order in which groups arrive has no effect.
    """

    def __init__(self, policy: CommandPolicy, tokenizer: TextTokenizer, seed: int = 0) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self._seed = seed
        self._generators: dict[str, np.random.Generator] = {}

    async def __call__(self, scope: Event, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI calls an application."""
        if scope["type"] != "http":
            raise RuntimeError(f"The small model has no {scope['type']} connections.")
        data = await read_body(receive)
        status, value = self._answer(scope["method"], scope["path"], data)
        await send_json(status, value, send)

    def sample(self, prompt: str) -> SampledAnswer:
        """Return an answer to a prompt.

        Args:
            prompt: the whole conversation, with the template of the chat.

        Raises:
            ValueError: the prompt has no message of the user.
        """
        message = find_user_message(prompt)
        if _TOOL_MESSAGE in prompt:
            tokens = (*self._tokenizer.encode(CLOSING_TEXT), self._tokenizer.end_of_turn_id)
            return SampledAnswer(CLOSING_TEXT, tokens, [0.0] * len(tokens))
        features = describe_message(message)
        generator = self._generators.setdefault(message, np.random.default_rng([self._seed, zlib.crc32(message.encode())]))
        choice = int(generator.choice(len(self._policy.commands), p=np.exp(self._policy.log_probabilities(features))))
        written = self._policy.commands[choice]
        return SampledAnswer(written.text, written.tokens, self._policy.token_logprobs(choice, features))

    def _answer(self, method: str, path: str, data: bytes) -> tuple[int, Any]:
        match method, path:
            case "GET", "/health":
                return 200, {}
            case "GET", "/v1/models":
                return 200, {"object": "list", "data": [{"id": "small", "object": "model", "created": 0, "owned_by": "demo"}]}
            case "POST", "/generate":
                try:
                    return 200, self._generate(data)
                except (BadRequest, ValueError) as error:
                    return 400, {"error": {"message": str(error), "code": 400}}
        return 404, {"error": {"message": f"The small model has no {method} {path}; set openai.server_type to vllm.", "code": 404}}

    def _generate(self, data: bytes) -> dict[str, Any]:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise BadRequest("The body of the request is not a JSON object.")
        request = read_generate_request(body, self._tokenizer)
        if not isinstance(request, VllmRequest):
            raise BadRequest("The small model answers requests of vLLM alone: set openai.server_type to vllm.")
        if body.get("temperature", 1.0) != 1.0:
            raise BadRequest("The small model samples with temperature 1 alone, because the log probabilities are those of that temperature.")
        prompt = self._tokenizer.decode(list(request.tokens))
        answers = [_cut(self.sample(prompt), request.max_tokens) for _ in range(request.count)]
        return {
            "text": [answer.text for answer, _ in answers],
            "finish_reasons": [finish_reason for _, finish_reason in answers],
            "logprobs": [[[{token: logprob}] for token, logprob in zip(answer.tokens, answer.logprobs, strict=True)] for answer, _ in answers],
            "token_ids": [answer.tokens for answer, _ in answers],
        }


def _cut(answer: SampledAnswer, max_tokens: int | None) -> tuple[SampledAnswer, str]:
    """Return an answer with at most so many tokens, and why it ends."""
    if max_tokens is None or len(answer.tokens) <= max_tokens:
        return answer, "stop"
    return SampledAnswer(answer.text, answer.tokens[:max_tokens], answer.logprobs[:max_tokens]), "length"

"""The requests and responses of the scripted model server: OpenAI chat completions, and `/generate` of vLLM (as atroposlib 0.4.0 uses it) and of SGLang."""

from __future__ import annotations

import contextlib
import json
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from environments.demo.answers import AnswerWriter, ChatAnswer, TokenAnswer, estimate_message_tokens
from environments.demo.conversations import ConversationSoFar
from environments.demo.script import Fault, Turn
from environments.demo.tokenizer import TextTokenizer

#: How many bytes a token has in the data of a conversation.
_TOKEN_BYTES = array("I").itemsize


class BadRequest(Exception):
    """The request cannot be answered. The message says why."""


@dataclass(frozen=True, slots=True)
class PlayedTurn:
    """The answer of one conversation to a request.

    Args:
        content: the answer as a member of the response, such as a choice.
        next_request: what the next request of the conversation starts with.
    """

    content: Any
    next_request: ConversationSoFar


class AnswerRequest(Protocol):
    """A request for answers of the model, in one of the formats."""

    @property
    def count(self) -> int:
        """How many answers are asked for."""

    @property
    def conversation(self) -> ConversationSoFar:
        """The conversation so far."""

    def first_message(self) -> str:
        """Return the first message of the user, or a text that contains it."""

    def play(self, writer: AnswerWriter, turn: Turn, fault: Fault | None, number: int) -> PlayedTurn:
        """Return a turn in this format.

        Args:
            writer: writes the answers.
            turn: the turn.
            fault: what the model does wrong, or None.
            number: a number that no other answer has.
        """

    def response(self, played: Sequence[PlayedTurn], number: int) -> Any:
        """Return the response with the answers, as a JSON value. Without answers, it is a response without choices."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A chat completion.

    Args:
        messages: the conversation.
        count: how many answers are asked for.
        max_tokens: the most tokens of an answer, or None.
        with_tools: whether the model may call tools.
        model: the name of the model.
        conversation: the conversation so far.
    """

    messages: Sequence[dict[str, Any]]
    count: int
    max_tokens: int | None
    with_tools: bool
    model: str
    conversation: ConversationSoFar

    def first_message(self) -> str:
        return next((_content_text(message) for message in self.messages if message.get("role") == "user"), "")

    def play(self, writer: AnswerWriter, turn: Turn, fault: Fault | None, number: int) -> PlayedTurn:
        answer = writer.write_chat(turn, fault, max_tokens=self.max_tokens, with_tools=self.with_tools)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            message["tool_calls"] = [
                {"id": f"call_{number:x}_{index}", "type": "function", "function": {"name": call.tool, "arguments": call.arguments}}
                for index, call in enumerate(answer.calls)
            ]
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        data = self.conversation.data + _message_data(message)
        return PlayedTurn((message, answer), ConversationSoFar(data, key=_calls_key(message)))

    def response(self, played: Sequence[PlayedTurn], number: int) -> Any:
        answers: list[tuple[dict[str, Any], ChatAnswer]] = [one.content for one in played]
        written = sum(answer.token_count for _, answer in answers)
        read = estimate_message_tokens(self.messages)
        return {
            "id": f"chatcmpl-{number}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [
                {"index": index, "message": message, "finish_reason": answer.finish_reason, "logprobs": None} for index, (message, answer) in enumerate(answers)
            ],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }


@dataclass(frozen=True, slots=True)
class _TokenRequest:
    """A request of `/generate`.

    Args:
        tokens: the tokens of the prompt.
        count: how many answers are asked for.
        max_tokens: the most tokens of an answer, or None.
        tokenizer: decodes the prompt.
        conversation: the conversation so far.
    """

    tokens: Sequence[int]
    count: int
    max_tokens: int | None
    tokenizer: TextTokenizer
    conversation: ConversationSoFar

    def first_message(self) -> str:
        return self.tokenizer.decode(list(self.tokens))

    def play(self, writer: AnswerWriter, turn: Turn, fault: Fault | None, number: int) -> PlayedTurn:
        answer = writer.write_tokens(turn, fault, self.max_tokens)
        return PlayedTurn(answer, ConversationSoFar(self.conversation.data + _token_data(answer.tokens)))


class VllmRequest(_TokenRequest):
    """A request of vLLM's `/generate`, as atroposlib's server for vLLM reads and answers it."""

    __slots__ = ()

    def response(self, played: Sequence[PlayedTurn], number: int) -> Any:
        answers: list[TokenAnswer] = [one.content for one in played]
        return {
            "text": [answer.text for answer in answers],
            "finish_reasons": [answer.finish_reason for answer in answers],
            "logprobs": [[[{token: logprob}] for token, logprob in zip(answer.tokens, token_logprobs(answer.tokens), strict=True)] for answer in answers],
            "token_ids": [answer.tokens for answer in answers],
        }


class SglangRequest(_TokenRequest):
    """A request of SGLang's `/generate`."""

    __slots__ = ()

    def response(self, played: Sequence[PlayedTurn], number: int) -> Any:
        results = [self._result(one.content, f"{number}-{index}") for index, one in enumerate(played)]
        return results[0] if len(results) == 1 else results

    def _result(self, answer: TokenAnswer, name: str) -> dict[str, Any]:
        stopped = answer.finish_reason == "stop"
        reason = {"type": "stop", "matched": self.tokenizer.end_of_turn_id} if stopped else {"type": "length", "length": len(answer.tokens)}
        return {
            "text": answer.text,
            "output_ids": answer.tokens,
            "meta_info": {
                "id": name,
                "finish_reason": reason,
                "prompt_tokens": len(self.tokens),
                "completion_tokens": len(answer.tokens),
                "output_token_logprobs": [[logprob, token, None] for token, logprob in zip(answer.tokens, token_logprobs(answer.tokens), strict=True)],
            },
        }


def token_logprobs(tokens: Sequence[int]) -> list[float]:
    """Return a log probability for each token: between -2 and 0, and always the same for the same token at the same place."""
    return [-(1 + (token * 2_654_435_761 + index * 40_503) % 1999) / 1000 for index, token in enumerate(tokens)]


def read_chat_request(body: Mapping[str, Any], default_model: str) -> ChatRequest:
    """Read the body of a chat completion.

    Args:
        body: the body.
        default_model: the name of the model, if the request has none.

    Raises:
        BadRequest: the body is none, or asks for a stream.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise BadRequest("A chat completion needs a list of messages.")
    if body.get("stream"):
        raise BadRequest("The scripted model server does not stream answers. Leave out stream, or set it to false.")
    data, boundaries, key = bytearray(), [], b""
    for message in messages:
        data += _message_data(message)
        if message.get("role") == "assistant":
            boundaries.append(len(data))
            key = _calls_key(message)
    return ChatRequest(
        messages=messages,
        count=_count(body.get("n")),
        max_tokens=_limit(body.get("max_completion_tokens") or body.get("max_tokens")),
        with_tools=bool(body.get("tools")) and body.get("tool_choice") != "none",
        model=str(body.get("model") or default_model),
        conversation=ConversationSoFar(bytes(data), boundaries, key),
    )


def read_generate_request(body: Mapping[str, Any], tokenizer: TextTokenizer | None) -> VllmRequest | SglangRequest:
    """Read the body of `/generate`: with `prompt` it is one for vLLM, with `input_ids` or `text` one for SGLang.

    Args:
        body: the body.
        tokenizer: encodes a prompt that is text.

    Raises:
        BadRequest: the body is none of both, or the server has no tokenizer.
    """
    if tokenizer is None:
        raise BadRequest("The scripted model server has no tokenizer, which /generate needs. Start it with one.")
    if "prompt" in body:
        prompt = body["prompt"]
        prompt = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, dict) else prompt
        return VllmRequest(*_token_members(prompt, body, "max_tokens", tokenizer))
    if "input_ids" not in body and "text" not in body:
        raise BadRequest("A request of /generate needs `prompt` (vLLM), or `input_ids` or `text` (SGLang).")
    sampling = body.get("sampling_params") or {}
    return SglangRequest(*_token_members(body.get("input_ids", body.get("text")), sampling, "max_new_tokens", tokenizer))


def _token_members(
    prompt: object, sampling: Mapping[str, Any], limit_name: str, tokenizer: TextTokenizer
) -> tuple[list[int], int, int | None, TextTokenizer, ConversationSoFar]:
    if sampling.get("stream"):
        raise BadRequest("The scripted model server does not stream answers. Leave out stream, or set it to false.")
    tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    if not isinstance(tokens, list) or not tokens:
        raise BadRequest("The prompt is neither a text nor a list of tokens.")
    try:
        data = _token_data(tokens)
    except (TypeError, OverflowError) as error:
        raise BadRequest(f"The prompt is no list of tokens: {error}.") from error
    boundaries: list[int] = []
    for index in _indices(tokens, tokenizer.end_of_turn_id):  # an answer ends after this token, or before it if its limit of tokens ended it
        boundaries += (index * _TOKEN_BYTES, (index + 1) * _TOKEN_BYTES)
    return tokens, _count(sampling.get("n")), _limit(sampling.get(limit_name)), tokenizer, ConversationSoFar(data, boundaries)


def _token_data(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _indices(tokens: list[int], token: int) -> Iterator[int]:
    """Return the indices of a token. `list.index` is much faster than a loop over a long prompt."""
    index = -1
    with contextlib.suppress(ValueError):  # there is no further one
        while True:
            index = tokens.index(token, index + 1)
            yield index


def _message_data(message: Mapping[str, Any]) -> bytes:
    """Return what of a message identifies it. Clients add and leave out members, but not these."""
    calls = [
        (call.get("id"), (call.get("function") or {}).get("name"), (call.get("function") or {}).get("arguments")) for call in message.get("tool_calls") or ()
    ]
    return json.dumps([message.get("role"), _content_text(message), calls]).encode() + b"\n"


def _calls_key(message: Mapping[str, Any]) -> bytes:
    """Return what identifies an answer with calls: their identifiers. So it is recognised even if the client has shortened the conversation before it."""
    return "\n".join(str(call.get("id")) for call in message.get("tool_calls") or ()).encode()


def _content_text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _count(value: object) -> int:
    if value is None:
        return 1
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 1024:
        raise BadRequest(f"The number of answers must be a whole number from 1 to 1024, not {value!r}.")
    return value


def _limit(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"The limit of tokens must be a whole number of at least 1, not {value!r}.")
    return value

"""The model of one trajectory behind a managed server of atroposlib, which keeps exact tokens, masks and log probabilities.

Nothing here imports atroposlib. The managed server is used through the methods and attributes that atroposlib 0.4.0, which is frozen, has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from environments.conversation.answers import Message
from environments.prompt_continuation import continue_prompt
from environments.tool_call_translator import ToolCallTranslator


@dataclass(slots=True)
class _Prompt:
    """A prompt: the conversation and the sequence of tokens that it was made from, its text, and its tokens, as soon as they are known."""

    messages: list[Mapping[str, Any]]
    node: Any
    text: str
    tokens: list[int] | None = None


class ManagedModel:
    """A chat server for the agent loop whose tokens stay one sequence, and which never exceeds the context of the model.

    Args:
        managed: atroposlib's managed server, of this trajectory alone.
        translator: translates tool calls, for this trajectory alone.
        tokenizer: the tokenizer of the model.
        tools: the schemas of the tools.
        max_tokens: the most tokens of the whole trajectory.
    """

    def __init__(self, managed: Any, translator: ToolCallTranslator, tokenizer: Any, tools: Sequence[Mapping[str, Any]], max_tokens: int) -> None:
        self._managed = managed
        self._translator = translator
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self._max_tokens = max_tokens
        self._latest: _Prompt | None = None
        # atroposlib's own translator needs vLLM, and its own prompts lose what a chat template changes in earlier messages.
        managed._translator = translator
        managed._convert_messages_to_prompt = self._next_prompt
        managed._compute_input_ids = self._prompt_tokens

    async def chat_completion(self, **request: Any) -> Any:
        """Answer a conversation; see `ChatServer`. The answer is cut where the trajectory would exceed its most tokens."""
        room = max(1, self._max_tokens - self.count_tokens(request["messages"]))
        request["max_tokens"] = min(room, request.get("max_tokens") or room)
        return await self._managed.chat_completion(**request)

    def get_state(self) -> Mapping[str, Any]:
        """Return the sequences of tokens so far."""
        state: Mapping[str, Any] = self._managed.get_state()
        return state

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Return how many tokens the prompt for the next answer has."""
        prompt = self._prompt(messages)
        continued = prompt.node if prompt.node is not None and prompt.text.startswith(prompt.node.full_text) else None
        return len(self._prompt_tokens(prompt.text, continued))

    def _next_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """Return the prompt for the next answer, which continues what the model has seen and written. atroposlib passes the same tools again."""
        return self._prompt(messages).text

    def _prompt(self, messages: Sequence[Mapping[str, Any]]) -> _Prompt:
        """Return the prompt for the next answer. The agent loop, `chat_completion` and atroposlib ask for it in turn, and it is made once."""
        nodes = self._managed.current_nodes
        node = nodes[-1] if nodes else None
        latest = self._latest
        if latest is None or latest.node is not node or latest.messages != list(messages):
            converted = self._translator.convert_messages_for_template(messages)
            continued = continue_prompt(node.full_text, converted, self._render, self._translator.end_of_turn) if node is not None else None
            latest = self._latest = _Prompt(list(messages), node, self._render(converted) if continued is None else continued)
        return latest

    def _prompt_tokens(self, text: str, node: Any) -> list[int]:
        """Return the tokens of a prompt as atroposlib makes them, which asks for those of the latest prompt again.

        Args:
            text: the prompt.
            node: the sequence of tokens that the prompt continues; None if it begins one.
        """
        latest = self._latest
        if latest is not None and latest.tokens is not None and latest.text is text:
            return list(latest.tokens)
        if node is None:
            tokens = self._tokenizer.encode(text, add_special_tokens=True)
        else:
            tokens = node.tokens + self._tokenizer.encode(text[len(node.full_text) :], add_special_tokens=False)
        if latest is not None and latest.text is text:
            latest.tokens = tokens
        return list(tokens)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        rendered = self._tokenizer.apply_chat_template(list(messages), tools=self._tools, tokenize=False, add_generation_prompt=True)
        return str(rendered)

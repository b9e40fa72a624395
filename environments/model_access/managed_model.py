"""The model of one trajectory behind a managed server of atroposlib, which keeps exact tokens, masks and log probabilities.

Nothing here imports atroposlib. The managed server is used through the methods and attributes that atroposlib 0.4.0, which is frozen, has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from environments.conversation.answers import Message
from environments.prompt_continuation import continue_prompt
from environments.tool_call_translator import ToolCallTranslator


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
        # atroposlib's own translator needs vLLM, and its own prompts lose what a chat template changes in earlier messages.
        managed._translator = translator
        managed._convert_messages_to_prompt = self._next_prompt

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
        prompt = self._next_prompt(messages)
        nodes = self._managed.current_nodes
        if nodes and prompt.startswith(nodes[-1].full_text):
            added = self._tokenizer.encode(prompt[len(nodes[-1].full_text) :], add_special_tokens=False)
            return len(nodes[-1].tokens) + len(added)
        return len(self._tokenizer.encode(prompt, add_special_tokens=True))

    def _next_prompt(self, messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
        """Return the prompt for the next answer, which continues what the model has seen and written. atroposlib passes the same tools again."""
        converted = self._translator.convert_messages_for_template(messages)
        nodes = self._managed.current_nodes
        continued = continue_prompt(nodes[-1].full_text, converted, self._render, self._translator.end_of_turn) if nodes else None
        return self._render(converted) if continued is None else continued

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        rendered = self._tokenizer.apply_chat_template(list(messages), tools=self._tools, tokenize=False, add_generation_prompt=True)
        return str(rendered)

"""The tokens of conversations with model servers that return none: the messages are tokenized again, in a thread of their own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from environments.conversation.answers import Message
from environments.conversation.context import TokenCounter, estimate_tokens
from environments.model_access.trajectory_tokens import TokensUnusable, TrajectoryTokens
from environments.tool_call_translator import ToolCallTranslator

#: The reason of a fault whose cause is the chat template.
CHAT_TEMPLATE = "chat_template"


class ConversationTokens:
    """Tokenizes conversations.

    Args:
        tokenizer: a tokenizer that nothing else uses: tokenizers cannot be used by several threads at once.
        parser_name: the family of the model, in whose way tool calls are written.
        tokenize: atroposlib's `tokenize_for_trainer`.
    """

    def __init__(self, tokenizer: Any, parser_name: str, tokenize: Callable[..., Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._translator = ToolCallTranslator.for_tokenizer(parser_name, tokenizer)
        self._tokenize = tokenize
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def tokenize(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> TrajectoryTokens:
        """Return the tokens of a conversation; the model is trained on all of its own messages.

        Args:
            messages: the conversation.
            tools: the schemas of the tools, which the chat template writes into the prompt.

        Raises:
            TokensUnusable: the chat template refuses the conversation.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._tokenize_messages, list(messages), list(tools))

    def counter(self, tools: Sequence[Mapping[str, Any]], max_tokens: int) -> TokenCounter:
        """Return what counts the tokens of a conversation: exactly where it matters, and by a cautious estimate where it is far from the maximum.

        Args:
            tools: the schemas of the tools.
            max_tokens: the maximum.
        """
        tool_tokens = len(json.dumps(list(tools))) // 3

        def count(messages: Sequence[Message]) -> int:
            estimated = estimate_tokens(messages) + tool_tokens
            if estimated <= max_tokens:
                return estimated
            return self._thread.submit(self._count, list(messages), list(tools)).result()

        return count

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _tokenize_messages(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> TrajectoryTokens:
        chat = self._translator.convert_messages_for_template(messages)
        try:
            tokenized = self._tokenize(_TokenizerWithTools(self._tokenizer, tools), chat, train_on_all_assistant_turns=True)
        except Exception as error:  # a template raises errors of its own
            raise TokensUnusable(f"tokenizer_name: its chat template refuses the conversation: {error}", reason=CHAT_TEMPLATE) from error
        return TrajectoryTokens(list(tokenized["tokens"]), list(tokenized["masks"]))

    def _count(self, messages: list[Message], tools: list[Mapping[str, Any]]) -> int:
        chat = self._translator.convert_messages_for_template(messages)
        try:
            return len(_TokenizerWithTools(self._tokenizer, tools).apply_chat_template(chat, add_generation_prompt=True))
        except Exception as error:  # a template raises errors of its own
            raise TokensUnusable(f"tokenizer_name: its chat template refuses the conversation: {error}", reason=CHAT_TEMPLATE) from error


class _TokenizerWithTools:
    """A tokenizer whose chat template always gets the schemas of the tools, as the model server's does."""

    def __init__(self, tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self._tools = [dict(tool) for tool in tools]
        self.eos_token_id = tokenizer.eos_token_id

    def apply_chat_template(self, chat: Sequence[Message], **options: Any) -> list[int]:
        """Return the tokens of a conversation."""
        tokens: list[int] = self._tokenizer.apply_chat_template(list(chat), tools=self._tools, **{"tokenize": True, **options})
        return tokens

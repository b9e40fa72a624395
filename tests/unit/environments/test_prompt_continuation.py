"""Prompts that continue a conversation, with chat templates that change the model's earlier messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from environments.prompt_continuation import PromptRenderer, continue_prompt
from environments.tool_call_parsers import get_parser
from environments.tool_call_translator import ToolCallTranslator
from tests.unit.environments.scripted_model import TOOLS, call

Messages = Sequence[Mapping[str, Any]]


def stripping(messages: Messages) -> str:
    """As Llama's template does: the content of every message is stripped."""
    return "".join(f"<{message['role']}>{message['content'].strip()}<eot>" for message in messages) + "<assistant>"


def without_reasoning(messages: Messages) -> str:
    """As GLM's template does: reasoning moves, and the next role ends a turn of the model."""
    written = ""
    for message in messages:
        content = message["content"].rpartition("</think>")[2].strip()
        if message["role"] == "assistant":
            content = f"\n<think></think>\n{content}"
        written += f"<{message['role']}>{content}"
    return written + "<assistant>"


TEMPLATES = pytest.mark.parametrize(("render", "ending"), [(stripping, "<eot>"), (without_reasoning, "<tool>")], ids=["stripping", "reasoning"])


def played(render: PromptRenderer, ending: str, texts: Sequence[str]) -> tuple[str, list[str]]:
    """Play a conversation in which the model writes the texts; return its whole text, and the prompts."""
    translator = ToolCallTranslator(get_parser("hermes"), [ending])
    conversation: list[dict[str, Any]] = [{"role": "user", "content": " Go. "}]
    prompts = [render(conversation)]
    for text in texts:
        seen = prompts[-1] + text + ending
        content, calls, _ = translator.parse_model_output(text + ending, "auto", TOOLS)
        written = [call(one.function.name, one.function.arguments, one.id) for one in calls or ()]
        conversation += [{"role": "assistant", "content": content, "tool_calls": written}, {"role": "tool", "content": "result"}]
        prompt = continue_prompt(seen, translator.convert_messages_for_template(conversation), render, translator.end_of_turn)
        assert prompt is not None
        prompts.append(prompt)
    return prompts[-1], prompts


@TEMPLATES
@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(
        st.lists(
            st.sampled_from(
                ["<think>Hm.</think>", "\n", "  ", '<tool_call>{"name": "terminal", "arguments": {}}</tool_call>', "Look.", "<tool_call>x</tool_call>"]
            )
        )
        .map("".join)
        .filter(lambda text: not text.endswith(("<eot>", "<tool>"))),
        min_size=1,
        max_size=4,
    )
)
def test_every_prompt_continues_the_text_so_far(render: PromptRenderer, ending: str, texts: list[str]) -> None:
    whole, prompts = played(render, ending, texts)

    assert all(later.startswith(earlier + text + ending) for earlier, text, later in zip(prompts, texts, prompts[1:], strict=False))
    assert whole.count("result") == len(texts)


@TEMPLATES
def test_the_template_writes_what_comes_after_the_message(render: PromptRenderer, ending: str) -> None:
    text = '<think>Hm.</think>\n<tool_call>{"name": "terminal", "arguments": {}}</tool_call>\n'

    whole, prompts = played(render, ending, [text])

    after = "<eot><tool>result<eot><assistant>" if ending == "<eot>" else "<tool>result<assistant>"
    assert whole == prompts[0] + text + after


def test_an_answer_that_was_cut_off_gets_the_end_of_its_turn_from_the_template() -> None:
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "I was"}, {"role": "user", "content": "Go on."}]

    assert continue_prompt("<user>Go.<eot><assistant>I was", messages, stripping, ["<eot>"]) == stripping(messages)


def test_a_text_that_does_not_end_with_the_latest_message_is_not_continued() -> None:
    messages = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "Yes."}]

    assert continue_prompt("<user>Go.<eot><assistant>No.<eot>", messages, stripping, ["<eot>"]) is None
    assert continue_prompt("", messages[:1], stripping, ["<eot>"]) is None
    assert continue_prompt("<assistant>Yes.<eot>", messages, lambda shown: "a template without answers", ["<eot>"]) is None

"""Property tests of phase 2: whatever a model writes, one sequence of tokens holds exactly what it saw and wrote, with atroposlib's own managed server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from environments.agent_loop import AgentLoop, AgentLoopSettings, AgentResult, LoopEnd
from environments.conversation.tool_replies import ToolReply
from environments.demo.tokenizer import make_tokenizer
from environments.model_access.managed_model import ManagedModel
from environments.model_access.trajectory_tokens import NO_LOGPROB, NOT_TRAINED, tokens_of_state
from environments.tool_call_parsers import PARSERS, ParsedCall, get_parser
from environments.tool_call_parsers.arguments import encode_json
from environments.tool_call_translator import ToolCallTranslator

with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["test"])
    from atroposlib.envs.server_handling.managed_server import ManagedServer

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}} for name in ("terminal", "read_file")]
#: A template that changes earlier messages, as those of many models do: it strips whitespace, and leaves out the reasoning.
CHANGING_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {%- set content = message.content or '' %}
    {%- if message.role == 'assistant' and '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content.strip() + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
NO_LIMIT = 1_000_000

fragments = st.sampled_from(
    [
        "", " ", "\n", "  \n", "I look first.", "it's \"quoted\"", "naïve 日本語 🙂\u200d", "\\n \\\\ \\u0041", "{", "}}", "<tool_call>", "</tool_call>",
        "<think>", "</think>", "placeholder-", "[TOOL_CALLS]", "```json", "<|im_start|>", "\r\n\t", "\ufffd",
    ]
)  # fmt: skip
texts = st.one_of(st.lists(st.one_of(fragments, st.text(max_size=8)), max_size=4).map("".join), st.just(""))
values = st.one_of(texts, st.integers(-9, 9), st.booleans(), st.none(), st.lists(texts, max_size=2))
arguments = st.dictionaries(st.sampled_from(["command", "path", "ключ"]), values, max_size=2)


@dataclass(frozen=True)
class WrittenTurn:
    """An answer of the model: its text, and whether it is written in unusual tokens, one for each byte."""

    text: str
    in_bytes: bool


@st.composite
def turns(draw: st.DrawFn, family: str) -> WrittenTurn:
    """An answer with calls, broken calls, or none, and text and reasoning around them."""
    parser = get_parser(family)
    reasoning = draw(st.sampled_from(["", "", "<think>\nhm </think>", "<think>\n<tool_call>draft</think>\n\n"]))
    before, after = draw(texts), draw(texts)
    calls = [
        ParsedCall(f"functions.terminal:{number}", draw(st.sampled_from(["terminal", "read_file", "none"])), encode_json(draw(arguments)))
        for number in range(draw(st.integers(0, 3)))
    ]
    formatted = parser.format_message(before, calls) if calls else before
    if draw(st.booleans()) and formatted:  # broken somewhere
        cut = draw(st.integers(0, len(formatted)))
        formatted = formatted[:cut] + draw(fragments) + formatted[cut + draw(st.integers(0, 3)) :]
    return WrittenTurn(reasoning + formatted + after, draw(st.booleans()))


@st.composite
def conversations(draw: st.DrawFn) -> tuple[str, list[WrittenTurn]]:
    """A family, and the answers of a model of it."""
    family = draw(st.sampled_from(sorted(PARSERS)))
    return family, draw(st.lists(turns(family), min_size=1, max_size=4))


@dataclass
class TokenServer:
    """A model server of phase 2 that writes the given answers, and remembers the tokens of each request and answer.

    Args:
        tokenizer: makes the tokens.
        answers: what the model writes.
    """

    tokenizer: Any
    answers: Sequence[WrittenTurn]
    config: Any = field(default_factory=lambda: SimpleNamespace(model_name="m"))
    seen: list[list[int]] = field(default_factory=list)
    written: list[list[int]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)

    async def tokens_and_logprobs_completion(self, **request: Any) -> tuple[list[int], list[list[int]], list[list[float]], list[str]]:
        """Answer as atroposlib's servers do."""
        answer = self.answers[len(self.seen)]
        parts = answer.text if answer.in_bytes else [answer.text]
        tokens = [token for part in parts for token in self.tokenizer.encode(part, add_special_tokens=False)] + [self.tokenizer.eos_token_id]
        written = tokens[: request["max_tokens"]]
        logprobs = [-(1 + len(self.seen)) - number / 1000 for number in range(len(written))]
        self.seen.append(list(request["input_ids"]))
        self.written.append(written)
        self.logprobs.append(logprobs)
        return list(request["input_ids"]), [list(written)], [list(logprobs)], ["stop" if len(written) == len(tokens) else "length"]


async def echo(tool: str, args: Mapping[str, Any], task_id: str, /) -> ToolReply:
    """Reply with the arguments."""
    return ToolReply(f'{{"output": "ünder \\"{tool}\\" {len(args)}\\n"}}', ok=True)


async def roll_out(server: TokenServer, family: str, max_tokens: int) -> AgentResult:
    translator = ToolCallTranslator.for_tokenizer(family, server.tokenizer)
    model = ManagedModel(ManagedServer(server, tokenizer=server.tokenizer), translator, server.tokenizer, TOOLS, max_tokens)
    limits = AgentLoopSettings(max_turns=len(server.answers), max_context_tokens=max_tokens, shortens_context=False)
    loop = AgentLoop(model, echo, TOOLS, limits, count_tokens=model.count_tokens)
    return await loop.run([{"role": "system", "content": "You work.\n"}, {"role": "user", "content": " It's “done”? "}], "t")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    kept, changing = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    changing.chat_template = CHANGING_TEMPLATE
    return {"kept": kept, "changing": changing}


@pytest.mark.parametrize("template", ["kept", "changing"])
def test_tokens_are_what_the_model_saw_and_wrote(tokenizers: dict[str, Any], template: str) -> None:
    tokenizer = tokenizers[template]

    @settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
    @given(conversation=conversations(), room=st.one_of(st.just(NO_LIMIT), st.integers(1, 400)), length=st.integers(0, 2000))
    def check(conversation: tuple[str, list[WrittenTurn]], room: int, length: int) -> None:
        family, answers = conversation
        server = TokenServer(tokenizer, answers)
        prompt = tokenizer.apply_chat_template(
            [{"role": "system", "content": "You work.\n"}, {"role": "user", "content": " It's “done”? "}], tools=TOOLS, add_generation_prompt=True
        )
        max_tokens = len(prompt) + room
        result = asyncio.run(roll_out(server, family, max_tokens))
        whole = tokens_of_state(result.managed_state)  # there is one sequence

        assert len(whole.tokens) == len(whole.masks) == len(whole.logprobs or ()) <= max_tokens
        masks, logprobs = [NOT_TRAINED] * len(whole.tokens), [NO_LOGPROB] * len(whole.tokens)
        for seen, written, of_written in zip(server.seen, server.written, server.logprobs, strict=True):
            assert whole.tokens[: len(seen) + len(written)] == seen + written
            masks[len(seen) : len(seen) + len(written)] = written
            logprobs[len(seen) : len(seen) + len(written)] = of_written
        assert (whole.masks, whole.logprobs) == (masks, logprobs)
        if room == NO_LIMIT:
            expected = "".join(answer.text + tokenizer.eos_token for answer in answers[: result.turns_used])
            assert tokenizer.decode([token for token in whole.masks if token != NOT_TRAINED]) == expected
            assert result.end in (LoopEnd.ANSWERED, LoopEnd.MAX_TURNS)
        answered = [message for message in result.messages if message["role"] == "assistant"]
        seen_last = tokenizer.decode(server.seen[-1])
        before_last = result.messages[: result.messages.index(answered[-1])]
        assert all(message["content"].strip() in seen_last for message in before_last if message["role"] == "tool")

        cut = whole.cut(length)
        assert cut.tokens == whole.tokens[:length]
        assert len(cut.tokens) == len(cut.masks) == len(cut.logprobs or ())

    check()

"""Tests that the scripted model server speaks as real clients expect: the client of OpenAI, and the server classes of atroposlib with its managed server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from environments.agent_loop import AgentLoop, AgentLoopSettings, AgentResult, LoopEnd
from environments.demo.model_server import ScriptedModelServer
from environments.demo.tokenizer import TextTokenizer, make_tokenizer
from environments.tool_call_parsers import PARSERS
from environments.tool_call_translator import ToolCallTranslator

atroposlib = pytest.importorskip("atroposlib.envs.server_handling.server_manager")

TOOLS = [
    {
        "type": "function",
        "function": {"name": "terminal", "description": "Run.", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}},
    }
]
LOOK = {"text": "I look.", "calls": [{"tool": "terminal", "arguments": {"command": "ls 'ü' \"<a>\""}}]}
SCRIPT = {
    "prompts": [
        {"match": "Play", "trajectories": [{"turns": [LOOK, {"calls": [LOOK["calls"][0]] * 2}, {"text": "Done."}]}]},
        {"match": "Endless", "trajectories": [{"turns": [{"text": "And so", "fault": {"kind": "length"}}]}]},
        {"match": "Broken", "trajectories": [{"turns": [{**LOOK, "fault": {"kind": "malformed_call"}}, LOOK, {"text": "Done."}]}]},
    ]
}
MESSAGES = {name: [{"role": "system", "content": "You help."}, {"role": "user", "content": f"{name} it."}] for name in ("Play", "Endless", "Broken")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
async def server(folder: Path) -> AsyncIterator[ScriptedModelServer]:
    async with ScriptedModelServer(SCRIPT, tokenizer=folder) as running:
        yield running


async def execute(tool: str, args: dict[str, Any], task_id: str) -> str:
    return f'{{"success": true, "output": "{tool}"}}'


async def run_loop(chat_server: Any, prompt: str = "Play", **settings: Any) -> AgentResult:
    return await AgentLoop(chat_server, execute, TOOLS, AgentLoopSettings(**settings)).run(MESSAGES[prompt], "t-1")


@asynccontextmanager
async def managing(server: ScriptedModelServer, kind: str, folder: Path) -> AsyncIterator[Any]:
    """Provide atroposlib's server manager, and close the connections that it leaves open."""
    config = atroposlib.APIServerConfig(
        server_type=kind, base_url=server.base_url, api_key="x", model_name="scripted", tokenizer_name=str(folder), health_check=False, timeout=20
    )
    manager = atroposlib.ServerManager([config])
    try:
        yield manager
    finally:
        await manager.servers[0].openai.close()


def test_the_tokenizer_is_made_quickly_and_transformers_reads_it_alike(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    began = time.process_time()
    made = make_tokenizer(tmp_path / "made")
    assert time.process_time() - began < 0.2
    ours, theirs = TextTokenizer.load(made), AutoTokenizer.from_pretrained(made)
    assert type(theirs) is PreTrainedTokenizerFast
    theirs.save_pretrained(tmp_path / "saved")
    saved = TextTokenizer.load(tmp_path / "saved")
    for text in ("", " a  b\n", "<|im_start|>user\nü 😀 \x00\r\n<|im_end|>", '<tool_call>\n{"name": "x"}\n</tool_call>', "don 't . , !"):
        tokens = ours.encode(text)
        assert tokens == theirs.encode(text) == saved.encode(text)
        assert ours.decode(tokens) == theirs.decode(tokens) == text
    assert ours.end_of_turn_id == theirs.eos_token_id == ours.encode("<|im_end|>")[0]
    assert len(ours.encode("<tool_call>")) > 1, "the tag of calls is plain text"

    calls = [{"id": "c", "type": "function", "function": {"name": "terminal", "arguments": '{"command": "ls"}'}}]
    messages = [*MESSAGES["Play"], {"role": "assistant", "content": None, "tool_calls": calls}, {"role": "tool", "content": "a.py"}]
    whole = theirs.apply_chat_template(messages, tools=TOOLS, tokenize=False, add_generation_prompt=True)
    begun = theirs.apply_chat_template(messages[:2], tools=TOOLS, tokenize=False, add_generation_prompt=True)
    assert whole.startswith(begun + '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call><|im_end|>\n<|im_start|>tool\n')
    assert '"description": "Run."' in begun
    assert begun.index("You help.") < begun.index("# Tools") < begun.index("Play it.")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json and no tokenizer_config\.json"):
        TextTokenizer.load(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="no eos_token"):
        TextTokenizer.load(tmp_path)


async def test_the_client_of_openai(server: ScriptedModelServer) -> None:
    async with openai.AsyncOpenAI(base_url=server.base_url, api_key="x", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["scripted"]
        answer = await client.chat.completions.create(model="scripted", messages=MESSAGES["Play"], tools=TOOLS)  # type: ignore[arg-type]  # plain dictionaries
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls[0].function.name) == ("tool_calls", "I look.", "terminal")  # type: ignore[index, union-attr]  # asserted by this line
        assert answer.usage.total_tokens > 0  # type: ignore[union-attr]  # asserted by this line
        with pytest.raises(openai.BadRequestError, match="No prompt of the script"):
            await client.chat.completions.create(model="scripted", messages=[{"role": "user", "content": "Other"}])


async def test_the_openai_server_of_atroposlib(server: ScriptedModelServer, folder: Path) -> None:
    async with managing(server, "openai", folder) as manager:
        result = await run_loop(manager)
        both = await manager.chat_completion(messages=MESSAGES["Play"], n=2)
    assert (result.end, result.turns_used, result.tool_calls_executed_ok) == (LoopEnd.ANSWERED, 3, 3)
    assert (len(both.choices), server.conversation_count) == (2, 3)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_managed_server_has_one_sequence_of_tokens_for_a_conversation(server: ScriptedModelServer, folder: Path, kind: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)

    async def roll_out(prompt: str = "Play", **settings: Any) -> tuple[AgentResult, Any]:
        async with managing(server, kind, folder) as manager, manager.managed_server(tokenizer=tokenizer) as managed:
            managed._translator = ToolCallTranslator.for_tokenizer("hermes", tokenizer)
            return await run_loop(managed, prompt, **settings), managed.get_state()["nodes"]

    rollouts = await asyncio.gather(*(roll_out() for _ in range(4)), roll_out("Broken"))
    for result, nodes in rollouts:
        assert (result.end, len(nodes)) == (LoopEnd.ANSWERED, 1)
        node = nodes[0]
        assert tokenizer.decode(node.tokens) == node.full_text
        written = [index for index, token in enumerate(node.masked_tokens) if token != -100]
        texts = [tokenizer.decode([node.tokens[index] for index in written])]
        assert texts[0].count("<|im_end|>") == 3
        assert texts[0].endswith("</tool_call><|im_end|>Done.<|im_end|>")
        assert all((node.logprobs[index] < 0) == (index in set(written)) for index in range(len(node.tokens)))
    endless, _ = await roll_out("Endless", max_tokens=30)
    assert endless.end is LoopEnd.OUTPUT_LIMIT
    assert server.conversation_count == 6
    assert [len(result.tool_errors) for result, _ in rollouts] == [0, 0, 0, 0, 1]


def test_every_family_of_tool_calls_is_written_so_that_its_parser_reads_it(folder: Path) -> None:
    from environments.demo.answers import AnswerWriter
    from environments.demo.script import Turn, parse_script
    from environments.tool_call_parsers import get_parser

    turn = Turn.model_validate(LOOK)
    for family in PARSERS:
        writer = AnswerWriter(parse_script(SCRIPT | {"tool_call_family": family}), TextTokenizer.load(folder))
        answer = writer.write_tokens(turn, None, None)
        message = get_parser(family).parse(answer.text, TOOLS)
        assert [(call.name, call.arguments) for call in message.calls] == [("terminal", turn.calls[0].arguments_text)], family
        raw = writer.write_chat(Turn(raw=answer.text), None, max_tokens=None, with_tools=True)
        assert (raw.content, [(call.tool, call.arguments) for call in raw.calls]) == ("I look.", [("terminal", turn.calls[0].arguments_text)]), family

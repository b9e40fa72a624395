"""The agent loop with a model that plays written answers."""

from __future__ import annotations

import asyncio
import json
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from environments.agent_loop import MAX_CALLS_PER_ANSWER, AgentLoop, AgentLoopSettings, AgentResult, LoopEnd, ModelRequestFailed, ToolReply
from environments.tool_call_parsers import get_parser
from environments.tool_call_translator import ToolCallTranslator
from tests.unit.environments.scripted_model import TOOLS, RecordingTools, ScriptedModel, as_objects, call, contents, response

TASK: list[dict[str, Any]] = [{"role": "system", "content": "You fix bugs."}, {"role": "user", "content": "Fix it."}]
LS = call("terminal", {"command": "ls"})


async def roll_out(model: Any, tools: Any = None, settings: AgentLoopSettings | None = None, **options: Any) -> AgentResult:
    return await AgentLoop(model, tools or RecordingTools(), TOOLS, settings, **options).run(TASK, "trajectory-1")


@pytest.mark.parametrize("convert", [lambda value: value, as_objects], ids=["dictionaries", "objects"])
async def test_tools_are_executed_until_the_model_calls_none(convert: Any) -> None:
    model = ScriptedModel(convert(response("I look.", LS, call("read_file", {"path": "a"}, "call_2"))), convert(response("Done.")))
    tools = RecordingTools(ToolReply('{"output": "a\\n"}', ok=True), '{"content": "ä"}')

    result = await roll_out(model, tools)

    assert tools.calls == [("terminal", {"command": "ls"}, "trajectory-1"), ("read_file", {"path": "a"}, "trajectory-1")]
    assert result.messages == [
        *TASK,
        {"role": "assistant", "content": "I look.", "tool_calls": [LS, call("read_file", {"path": "a"}, "call_2")]},
        {"role": "tool", "tool_call_id": "call_1", "name": "terminal", "content": '{"output": "a\\n"}'},
        {"role": "tool", "tool_call_id": "call_2", "name": "read_file", "content": '{"content": "ä"}'},
        {"role": "assistant", "content": "Done."},
    ]
    assert (result.end, result.finished_naturally, result.turns_used) == (LoopEnd.ANSWERED, True, 2)
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid, result.tool_calls_executed_ok, result.tool_calls_exec_error) == (2, 2, 2, 0)
    assert result.tool_errors == []
    assert result.managed_state is None
    assert len(TASK) == 2


async def test_the_request_has_the_tools_and_the_settings() -> None:
    model = ScriptedModel(response("Done."))
    await roll_out(model, settings=AgentLoopSettings(temperature=0.5, max_tokens=100, request_options={"split": "eval"}))
    plain = ScriptedModel(response("Done."))
    await AgentLoop(plain, RecordingTools(), []).run(TASK, "t")

    assert model.requests == [{"messages": TASK, "tools": TOOLS, "n": 1, "temperature": 0.5, "max_tokens": 100, "split": "eval"}]
    assert plain.requests == [{"messages": TASK, "n": 1, "temperature": 1.0}]


async def test_a_rollout_ends_after_its_last_turn_with_the_replies_of_its_tools() -> None:
    result = await roll_out(ScriptedModel(*[response(None, LS)] * 3), settings=AgentLoopSettings(max_turns=3))

    assert (result.end, result.finished_naturally, result.turns_used) == (LoopEnd.MAX_TURNS, False, 3)
    assert [message["role"] for message in result.messages[2:]] == ["assistant", "tool"] * 3
    assert contents(result.messages, "assistant") == ["", "", ""]


async def test_an_answer_with_thousands_of_calls_gets_a_reply_to_each_and_few_are_executed() -> None:
    calls = [call("terminal", {"command": "ls"}, f"call_{number}") for number in range(10_000)]
    tools = RecordingTools()

    result = await roll_out(ScriptedModel(response(None, *calls), response("Done.")), tools)

    assert (len(tools.calls), result.tool_calls_attempted, result.tool_calls_schema_valid) == (MAX_CALLS_PER_ANSWER, 10_000, MAX_CALLS_PER_ANSWER)
    assert [message["tool_call_id"] for message in result.messages if message["role"] == "tool"] == [one["id"] for one in calls]
    assert "at most 128 calls" in result.tool_errors[0].error
    assert result.end is LoopEnd.ANSWERED


async def test_an_answer_that_was_cut_off_is_no_natural_end() -> None:
    result = await roll_out(ScriptedModel(response("I was about to", finish_reason="length")))

    assert (result.end, result.finished_naturally) == (LoopEnd.OUTPUT_LIMIT, False)


@pytest.mark.parametrize(
    ("name", "arguments", "executed"),
    [
        ("terminal", json.dumps(json.dumps({"command": 'echo "it\'s"'})), {"command": 'echo "it\'s"'}),
        ("terminal", '"ls -la"', {"command": "ls -la"}),
        ("terminal", "ls -la", {"command": "ls -la"}),
        ("terminal_stateful", "cd /", {"command": "cd /"}),
        ("read_file", '"a.txt"', {"input": "a.txt"}),
        ("read_file", "[1, 2]", {"input": [1, 2]}),
        ("terminal", "", {}),
    ],
)
async def test_arguments_that_are_no_object_are_coerced_and_counted(name: str, arguments: str, executed: dict[str, Any]) -> None:
    tools = RecordingTools()

    result = await roll_out(ScriptedModel(response(None, call(name, arguments)), response("Done.")), tools)

    assert tools.calls == [(name, executed, "trajectory-1")]
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid, result.tool_calls_executed_ok) == (1, 0, 1)
    assert result.messages[2]["tool_calls"][0]["function"]["arguments"] == arguments


async def test_broken_arguments_are_answered_with_the_place_of_the_error() -> None:
    tools = RecordingTools()

    result = await roll_out(ScriptedModel(response(None, call("terminal", '{"command": "ls')), response("Sorry.")), tools)

    assert tools.calls == []
    (error,) = result.tool_errors
    assert (error.turn, error.tool, error.arguments) == (1, "terminal", '{"command": "ls')
    assert error.error == "The arguments are not valid JSON: Unterminated string starting at character 12."
    assert json.loads(contents(result.messages, "tool")[0]) == {"error": error.error}
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid, result.tool_calls_exec_error) == (1, 0, 0)
    assert result.finished_naturally


async def test_an_unknown_tool_is_answered_with_the_names_of_the_tools() -> None:
    result = await roll_out(ScriptedModel(response(None, call("bash", {"command": "ls"})), response("Sorry.")))

    (error,) = result.tool_errors
    assert error.error == "Unknown tool 'bash'. The available tools are: read_file, terminal, terminal_stateful."
    assert json.loads(error.result) == {"error": error.error}
    assert contents(result.messages, "tool") == [error.result]
    assert [(one.executed, one.schema_valid, one.reply.fault) for one in result.calls] == [(False, False, "policy")]


async def test_a_call_that_could_not_be_parsed_is_answered_with_the_problem() -> None:
    """The whole way: the text of a model, the translator, the loop, and the text of the next prompt."""
    translator = ToolCallTranslator(get_parser("hermes"))
    texts = ['Hm.\n<tool_call>\n{"name": "terminal", "arguments": {"command": ls}}\n</tool_call>', "Sorry."]
    prompts: list[list[dict[str, Any]]] = []

    class Managed:
        async def chat_completion(self, *, messages: list[dict[str, Any]], tools: Any, **_: Any) -> dict[str, Any]:
            prompts.append(translator.convert_messages_for_template(messages))
            content, calls, finish = translator.parse_model_output(texts[len(prompts) - 1] + "<|im_end|>", "auto", tools)
            written = [call(one.function.name, one.function.arguments, one.id) for one in calls or ()]
            return response(content, *written, finish_reason=finish)

    result = await roll_out(Managed())

    (error,) = result.tool_errors
    assert (error.tool, error.arguments) == ("terminal", texts[0].removeprefix("Hm.\n"))
    assert error.error == "The tool call is not valid JSON: Expecting value at character 46."
    assert [message["content"] for message in prompts[1]] == ["You fix bugs.", "Fix it.", texts[0], json.dumps({"error": error.error})]
    assert (result.tool_calls_attempted, result.tool_calls_schema_valid, result.finished_naturally) == (1, 0, True)


async def test_a_tool_that_fails_is_counted_and_the_rollout_goes_on() -> None:
    failed = ToolReply('{"output": "", "exit_code": 124, "error": "timeout"}', ok=False, error="timeout", fault="policy", reason="timeout")
    tools = RecordingTools(failed, '{"error": "no such file"}')

    result = await roll_out(ScriptedModel(response(None, LS, call("read_file", {"path": "x"})), response("Done.")), tools)

    assert [(error.tool, error.error, error.result) for error in result.tool_errors] == [
        ("terminal", "timeout", failed.content),
        ("read_file", "no such file", '{"error": "no such file"}'),
    ]
    assert (result.tool_calls_executed_ok, result.tool_calls_exec_error, result.tool_calls_schema_valid) == (0, 2, 2)
    assert [(one.reply.fault, one.reply.reason) for one in result.calls] == [("policy", "timeout"), ("none", "")]
    assert result.finished_naturally


async def test_a_handler_that_raises_is_a_fault_of_ours_and_ends_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    tools = RecordingTools(RuntimeError("connection refused"))

    with caplog.at_level(logging.ERROR):
        result = await roll_out(ScriptedModel(response(None, LS, call("read_file", {"path": "x"}, "call_2"))), tools)

    assert (result.end, result.finished_naturally) == (LoopEnd.INFRA_FAULT, False)
    assert [(one.executed, one.reply.ok, one.reply.fault) for one in result.calls] == [(True, False, "infra"), (False, False, "infra")]
    assert result.tool_errors[0].error == "The tool could not be executed: RuntimeError: connection refused"
    assert [message["tool_call_id"] for message in result.messages[3:]] == ["call_1", "call_2"]
    assert (len(tools.calls), result.tool_calls_exec_error) == (1, 1)
    assert "The tool terminal of trajectory trajectory-1 raised an exception" in caplog.text


async def test_a_call_with_an_ambiguous_fault_does_not_end_the_rollout() -> None:
    tools = RecordingTools(ToolReply('{"error": "out of memory"}', ok=False, error="out of memory", fault="ambiguous", reason="oom"))

    result = await roll_out(ScriptedModel(response(None, LS), response("Done.")), tools)

    assert (result.end, result.calls[0].reply.fault) == (LoopEnd.ANSWERED, "ambiguous")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (TimeoutError("no answer in 5 s"), "The request to the model server failed in turn 2: TimeoutError: no answer in 5 s"),
        ({"choices": []}, "The model server gave no answer in turn 2: the response has no message."),
        (None, "The model server gave no answer in turn 2: the response has no message."),
        ({"choices": [{"finish_reason": "error"}]}, "The model server gave no answer in turn 2: the response has no message."),
    ],
)
async def test_a_model_server_that_fails_is_no_result(answer: Any, problem: str) -> None:
    with pytest.raises(ModelRequestFailed) as raised:
        await roll_out(ScriptedModel(response(None, LS), answer))

    assert str(raised.value) == problem
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize(
    ("fields", "reasoning"),
    [
        ({"reasoning_content": "Because."}, "Because."),
        ({"reasoning": "Because."}, "Because."),
        (
            {"reasoning_details": [{"type": "reasoning.text", "text": "First."}, {"type": "reasoning.summary", "summary": "Then."}, {"data": "x"}]},
            "First.\nThen.",
        ),
        ({"reasoning_content": "", "reasoning": None, "reasoning_details": []}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("convert", [lambda value: value, as_objects], ids=["dictionaries", "objects"])
async def test_reasoning_is_read_from_each_of_its_fields(fields: dict[str, Any], reasoning: str | None, convert: Any) -> None:
    result = await roll_out(ScriptedModel(convert(response("Look.", LS, **fields)), convert(response("Done."))))

    assert result.reasoning_per_turn == (reasoning, None)
    assert result.messages[2].get("reasoning_content") == reasoning
    assert "reasoning_content" not in result.messages[4]


async def test_content_in_parts_and_calls_without_identifier_are_read() -> None:
    nameless = {"type": "function", "function": {"name": "terminal", "arguments": {"command": "ls"}}}
    parts = [{"type": "text", "text": "I "}, {"type": "text", "text": "look."}]

    result = await roll_out(ScriptedModel(response(parts, nameless), response("Done.")))

    message, reply = result.messages[2:4]
    assert message["content"] == "I look."
    assert message["tool_calls"][0]["function"] == {"name": "terminal", "arguments": '{"command": "ls"}'}
    assert message["tool_calls"][0]["id"] == reply["tool_call_id"] != ""
    assert result.tool_calls_schema_valid == 1


async def test_a_cancelled_rollout_cancels_the_tool_call_and_asks_the_model_no_more() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def endless(tool: str, args: Any, task_id: str) -> str:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return "{}"

    model = ScriptedModel(response(None, LS, LS), response("Done."))
    task = asyncio.create_task(roll_out(model, endless))
    await began.wait()

    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()
    assert len(model.requests) == 1


async def test_the_loop_waits_before_each_tool_call_and_measures_the_time() -> None:
    times = iter(range(100))
    waits: list[float] = []

    async def sleep(delay_s: float) -> None:
        waits.append(delay_s)

    result = await roll_out(
        ScriptedModel(response(None, LS, LS), response("Done.")), settings=AgentLoopSettings(tool_delay_s=0.5), sleep=sleep, clock=lambda: float(next(times))
    )

    assert waits == [0.5, 0.5]
    assert (result.model_time_s, result.tool_time_s) == (2.0, 2.0)


def count_characters(messages: Any) -> int:
    return sum(len(message["content"]) for message in messages)


async def test_a_long_conversation_is_shortened_for_the_model_and_kept_whole_in_the_result() -> None:
    model = ScriptedModel(*[response(f"Step {index}.", LS) for index in range(8)], response("Done."))
    tools = RecordingTools(*[json.dumps({"output": str(index) * 3000}) for index in range(8)])

    result = await roll_out(model, tools, AgentLoopSettings(max_context_tokens=12_000), count_tokens=count_characters)

    assert result.finished_naturally
    assert all(count_characters(request["messages"]) <= 12_000 for request in model.requests)
    assert [len(content) for content in contents(result.messages, "tool")] == [3014] * 8
    last = model.requests[-1]["messages"]
    assert last[:2] == TASK
    assert last[-6:] == result.messages[-7:-1]
    assert "characters left out" in contents(last, "tool")[0]


async def test_a_managed_rollout_ends_where_it_no_longer_fits_into_the_context() -> None:
    node = SimpleNamespace(tokens=[1, 2], metadata={"finish_reason": "stop"})

    class Managed(ScriptedModel):
        def get_state(self) -> dict[str, Any]:
            return {"nodes": [node]}

    settings = AgentLoopSettings(max_context_tokens=4000, shortens_context=False)
    model = Managed(*[response("Step.", LS)] * 5)
    tools = RecordingTools(*["x" * 1500] * 5)

    result = await roll_out(model, tools, settings, count_tokens=count_characters)

    assert (result.end, result.turns_used, len(tools.calls)) == (LoopEnd.CONTEXT_FULL, 3, 3)
    assert [request["messages"] for request in model.requests] == [result.messages[:count] for count in (2, 4, 6)]
    assert result.managed_state == {"nodes": [node]}


async def test_the_node_of_a_managed_server_says_that_an_answer_was_cut_off() -> None:
    class Managed(ScriptedModel):
        def get_state(self) -> dict[str, Any]:
            return {"nodes": [SimpleNamespace(metadata={"finish_reason": "length"})]}

    result = await roll_out(Managed(response("I was about", finish_reason="stop")))

    assert result.end is LoopEnd.OUTPUT_LIMIT

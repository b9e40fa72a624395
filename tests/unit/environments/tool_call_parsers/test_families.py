"""Outputs in the format of each family of models, as their chat templates and serving stacks document them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from environments.tool_call_parsers import PARSERS, ParsedCall, UnknownParser, get_parser

Call = tuple[str, dict[str, Any]]
TERMINAL: Call = ("terminal", {"command": "ls -la"})
READ: Call = ("read_file", {"path": "/etc/hosts", "limit": 5})


def tool(name: str, **types: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {key: {"type": kind} for key, kind in types.items()}}},
    }


TOOLS = [tool("terminal", command="string"), tool("read_file", path="string", limit="integer"), tool("date")]


@dataclass(frozen=True)
class Sample:
    family: str
    text: str
    calls: list[Call]
    content: str = ""


SAMPLES = {
    "hermes": Sample("hermes", '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la"}}\n</tool_call>', [TERMINAL]),
    "hermes, on one line, arguments first": Sample("hermes", '<tool_call>{"arguments": {"command": "ls -la"}, "name": "terminal"}</tool_call>', [TERMINAL]),
    "hermes, two calls and text around them": Sample(
        "hermes",
        'I look.\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "/etc/hosts", "limit": 5}}\n</tool_call>\nThen I go on.',
        [TERMINAL, READ],
        "I look.\n\n\nThen I go on.",
    ),
    "hermes, the turn ends in front of the closing tag": Sample(
        "hermes", '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la"}}\n', [TERMINAL]
    ),
    "hermes, the closing tag in a string": Sample(
        "hermes",
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "echo \'</tool_call>\'"}}\n</tool_call>',
        [("terminal", {"command": "echo '</tool_call>'"})],
    ),
    "hermes, reasoning with a drafted call": Sample(
        "hermes",
        '<think>\nMaybe <tool_call>\n{"name": "terminal", "arguments": {"command": "rm -rf /"}}\n</tool_call>? No.\n</think>\n\n'
        '<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la"}}\n</tool_call>',
        [TERMINAL],
        '<think>\nMaybe <tool_call>\n{"name": "terminal", "arguments": {"command": "rm -rf /"}}\n</tool_call>? No.\n</think>',
    ),
    "hermes, reasoning that the prompt opened": Sample(
        "hermes",
        'Maybe <tool_call>{"name": "terminal", "arguments": {"command": "rm -rf /"}}</tool_call>? No.\n</think>\n'
        '<tool_call>{"name": "terminal", "arguments": {"command": "ls -la"}}</tool_call>',
        [TERMINAL],
        'Maybe <tool_call>{"name": "terminal", "arguments": {"command": "rm -rf /"}}</tool_call>? No.\n</think>',
    ),
    "hermes, the end of reasoning in a string": Sample(
        "hermes", '<tool_call>{"name": "terminal", "arguments": {"command": "grep </think> x"}}</tool_call>', [("terminal", {"command": "grep </think> x"})]
    ),
    "hermes, no arguments": Sample("hermes", '<tool_call>{"name": "date"}</tool_call>', [("date", {})]),
    "hermes, arguments that are JSON text already": Sample(
        "hermes", '<tool_call>\n{"name": "terminal", "arguments": "{\\"command\\": \\"ls -la\\"}"}\n</tool_call>', [TERMINAL]
    ),
    "hermes, half of a surrogate pair": Sample(
        "hermes", '<tool_call>{"name": "terminal", "arguments": {"command": "\\ud83d"}}</tool_call>', [("terminal", {"command": "\ud83d"})]
    ),
    "qwen": Sample("qwen", 'Let me see.\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls -la"}}\n</tool_call>', [TERMINAL], "Let me see."),
    "longcat": Sample("longcat", '<longcat_tool_call>{"name": "terminal", "arguments": {"command": "ls -la"}}</longcat_tool_call>', [TERMINAL]),
    "longcat, two calls": Sample(
        "longcat",
        'See.\n<longcat_tool_call>{"name": "terminal", "arguments": {"command": "ls -la"}}</longcat_tool_call>\n'
        '<longcat_tool_call>{"name": "read_file", "arguments": {"path": "/etc/hosts", "limit": 5}}</longcat_tool_call>',
        [TERMINAL, READ],
        "See.",
    ),
    "longcat, keys and values": Sample(
        "longcat",
        "<longcat_tool_call>\nread_file\n<longcat_arg_key>path</longcat_arg_key>\n<longcat_arg_value>/etc/hosts</longcat_arg_value>\n"
        "<longcat_arg_key>limit</longcat_arg_key>\n<longcat_arg_value>5</longcat_arg_value>\n</longcat_tool_call>",
        [READ],
    ),
    "mistral, array": Sample(
        "mistral",
        '[TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls -la"}}, {"name": "read_file", "arguments": {"path": "/etc/hosts", "limit": 5}}]',
        [TERMINAL, READ],
    ),
    "mistral, array without a space, arguments first, text before and after": Sample(
        "mistral", 'Hello[TOOL_CALLS][{"arguments":{"command": "ls -la"}, "name": "terminal", "id": "9Ae3bDc2F"}]\nmore', [TERMINAL], "Hello\nmore"
    ),
    "mistral, one object": Sample("mistral", '[TOOL_CALLS] {"name": "terminal", "arguments": {"command": "ls -la"}}', [TERMINAL]),
    "mistral, names in front of the arguments": Sample(
        "mistral", 'hi{hi[TOOL_CALLS]terminal{"command": "ls -la"}[TOOL_CALLS]read_file{"path": "/etc/hosts", "limit": 5}', [TERMINAL, READ], "hi{hi"
    ),
    "mistral, names, identifiers and [ARGS]": Sample(
        "mistral",
        '[TOOL_CALLS]terminal[CALL_ID]9Ae3bDc2F[ARGS]{"command": "ls -la"}[TOOL_CALLS]read_file[ARGS]{"path": "/etc/hosts", "limit": 5}',
        [TERMINAL, READ],
    ),
    "mistral, reasoning": Sample(
        "mistral", '[THINK]Hm.[/THINK]I look.[TOOL_CALLS]terminal[ARGS]{"command": "ls -la"}', [TERMINAL], "[THINK]Hm.[/THINK]I look."
    ),
    "llama3_json": Sample("llama3_json", '{"name": "terminal", "parameters": {"command": "ls -la"}}', [TERMINAL]),
    "llama3_json, python tag": Sample("llama3_json", '<|python_tag|>{"name": "terminal", "parameters": {"command": "ls -la"}}', [TERMINAL]),
    "llama3_json, type first": Sample("llama3_json", '{"type": "function", "name": "terminal", "parameters": {"command": "ls -la"}}', [TERMINAL]),
    "llama3_json, several calls and text": Sample(
        "llama3_json",
        'Here: {"name": "terminal", "parameters": {"command": "ls -la"}}; '
        '{"name": "read_file", "arguments": {"path": "/etc/hosts", "limit": 5}} and {so} on {"a": 1}',
        [TERMINAL, READ],
        'Here:  and {so} on {"a": 1}',
    ),
    "deepseek_v3": Sample(
        "deepseek_v3",
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>terminal\n```json\n"
        '{"command": "ls -la"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>read_file\n```json\n'
        '{"path": "/etc/hosts", "limit": 5}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [TERMINAL, READ],
        "I look.",
    ),
    "deepseek_v3, fences in a string": Sample(
        "deepseek_v3",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>terminal\n```json\n{"command": "echo \\"```\\" <｜tool▁call▁end｜>"}\n'
        "```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [("terminal", {"command": 'echo "```" <｜tool▁call▁end｜>'})],
    ),
    "deepseek_v3_1": Sample(
        "deepseek_v3_1",
        'some text<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>terminal<｜tool▁sep｜>{"command": "ls -la"}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>read_file<｜tool▁sep｜>{"path":"/etc/hosts","limit":5}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [TERMINAL, READ],
        "some text",
    ),
    "kimi_k2": Sample(
        "kimi_k2",
        "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>"
        '{"command": "ls -la"}<|tool_call_end|><|tool_call_begin|>functions.read_file:1 <|tool_call_argument_begin|>'
        '{\n  "path": "/etc/hosts",\n  "limit": 5\n}<|tool_call_end|><|tool_calls_section_end|>',
        [TERMINAL, READ],
        "I'll check.",
    ),
    "kimi_k2, no prefix and no section": Sample(
        "kimi_k2", '<|tool_call_begin|>terminal:3<|tool_call_argument_begin|>{"command": "ls -la"}<|tool_call_end|>', [TERMINAL]
    ),
    "glm45": Sample(
        "glm45",
        "<think>I want to see.</think>\n\nI look.\n<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>ls -la</arg_value>\n</tool_call>\n"
        "<tool_call>read_file\n<arg_key>path</arg_key>\n<arg_value>/etc/hosts</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>5</arg_value>\n</tool_call>",
        [TERMINAL, READ],
        "<think>I want to see.</think>\n\nI look.",
    ),
    "glm45, indented": Sample(
        "glm45", "Go. <tool_call>terminal\n    <arg_key>command</arg_key>\n    <arg_value>ls -la</arg_value>\n    </tool_call>", [TERMINAL], "Go."
    ),
    "glm45, no arguments": Sample("glm45", "<tool_call>date\n</tool_call>", [("date", {})]),
    "glm45, a closing tag in a value": Sample(
        "glm45",
        "<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>echo '</arg_value>'; ls</arg_value>\n</tool_call>",
        [("terminal", {"command": "echo '</arg_value>'; ls"})],
    ),
    "glm47": Sample(
        "glm47",
        "Checking.<tool_call>terminal<arg_key>command</arg_key><arg_value>ls -la</arg_value></tool_call>"
        "<tool_call>read_file<arg_key>path</arg_key><arg_value>/etc/hosts</arg_value><arg_key>limit</arg_key><arg_value>5</arg_value></tool_call>",
        [TERMINAL, READ],
        "Checking.",
    ),
    "glm47, no arguments": Sample("glm47", "<tool_call>date</tool_call>", [("date", {})]),
    "glm47, with line breaks": Sample("glm47", "<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>ls -la</arg_value>\n</tool_call>", [TERMINAL]),
    "qwen3_coder": Sample(
        "qwen3_coder",
        "Sure.\n\n<tool_call>\n<function=terminal>\n<parameter=command>\nls -la\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=read_file>\n<parameter=path>\n/etc/hosts\n</parameter>\n<parameter=limit>\n5\n</parameter>\n</function>\n</tool_call>",
        [TERMINAL, READ],
        "Sure.",
    ),
    "qwen3_coder, without the outer tags": Sample("qwen3_coder", "<function=terminal>\n<parameter=command>\nls -la\n</parameter>\n</function>", [TERMINAL]),
    "qwen3_coder, several lines": Sample(
        "qwen3_coder",
        "<tool_call>\n<function=terminal>\n<parameter=command>\n\ncat <<X\n  a</parameter>\nX\n\n</parameter>\n</function>\n</tool_call>",
        [("terminal", {"command": "\ncat <<X\n  a</parameter>\nX\n"})],
    ),
    "qwen3_coder, no parameters": Sample("qwen3_coder", "<tool_call>\n<function=date>\n</function>\n</tool_call>", [("date", {})]),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_the_calls_and_the_text_around_them_are_found(sample: Sample) -> None:
    message = get_parser(sample.family).parse(sample.text, TOOLS)

    assert [call.problem for call in message.calls] == [""] * len(sample.calls)
    assert [(call.name, json.loads(call.arguments)) for call in message.calls] == sample.calls
    assert message.content == sample.content
    assert get_parser(sample.family).render(message) == sample.text


@pytest.mark.parametrize("family", sorted(PARSERS))
def test_every_family_has_a_sample_and_plain_text_stays_as_it_is(family: str) -> None:
    assert family in {sample.family for sample in SAMPLES.values()}
    text = "  The answer is {42}, [see] <here>.\n"

    message = get_parser(family).parse(text, TOOLS)

    assert (message.calls, message.content) == ((), text)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", "A call stands in <tool_call> tags."),
        ("glm47", "A call stands in <tool_call> tags."),
        ("qwen3_coder", "A call stands in <tool_call> tags."),
        ("longcat", "A call stands in <longcat_tool_call> tags."),
        ("hermes", '<think>I could call <tool_call>{"name": "terminal", "arguments": {}}</tool_call> but the turn ended'),
        ("llama3_json", 'A person is {"name": "Ada", "age": 36}.'),
        ("llama3_json", 'A list: [{"name": "a"}, {"name": "b'),
    ],
)
def test_text_that_speaks_of_calls_is_no_call(family: str, text: str) -> None:
    message = get_parser(family).parse(text, TOOLS)

    assert (message.calls, message.content) == ((), text)


def test_identifiers_of_the_model_are_kept() -> None:
    kimi = get_parser("kimi_k2").parse(SAMPLES["kimi_k2"].text)
    mistral = get_parser("mistral").parse(SAMPLES["mistral, names, identifiers and [ARGS]"].text)
    array = get_parser("mistral").parse(SAMPLES["mistral, array without a space, arguments first, text before and after"].text)

    assert [call.call_id for call in kimi.calls] == ["functions.terminal:0", "functions.read_file:1"]
    assert mistral.calls[0].call_id == array.calls[0].call_id == "9Ae3bDc2F"
    assert len(mistral.calls[1].call_id) == 9
    assert mistral.calls[1].call_id.isalnum()


def test_a_bare_index_of_kimi_names_the_only_tool() -> None:
    text = '<|tool_call_begin|>0<|tool_call_argument_begin|>{"command": "ls"}<|tool_call_end|>'

    one = get_parser("kimi_k2").parse(text, TOOLS[:1])
    several = get_parser("kimi_k2").parse(text, TOOLS)

    assert [(call.name, call.call_id, call.problem) for call in one.calls] == [("terminal", "0", "")]
    assert [call.problem for call in several.calls] == ["The identifier 0 does not name a tool, as functions.NAME:0 does."]


def test_arguments_that_are_no_object_are_encoded_once() -> None:
    parse = get_parser("hermes").parse

    def arguments(text: str) -> str:
        (call,) = parse(f'<tool_call>{{"name": "terminal", "arguments": {text}}}</tool_call>').calls
        return call.arguments

    assert arguments('"ls -la"') == '"ls -la"'
    assert arguments('"{\\"command\\": \\"ls"') == '{"command": "ls'  # was meant to be an object
    assert arguments("[1, 2]") == "[1, 2]"
    assert arguments("null") == "null"


def test_values_without_quotes_get_the_type_of_the_schema() -> None:
    types = {"a": "string", "b": "integer", "c": "boolean", "d": "object", "e": "array", "f": ["string", "null"], "g": "number"}
    properties: dict[str, Any] = {key: {"type": kind} for key, kind in types.items()} | {
        "h": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "i": {"enum": ["1", "2"]},
    }
    schema = {"type": "function", "function": {"name": "t", "parameters": {"type": "object", "properties": properties}}}
    values = {"a": "5", "b": "5", "c": "True", "d": '{"x": [1]}', "e": "[]", "f": "null", "g": "2.5", "h": "None", "i": "1", "unknown": "7", "text": '"q"'}
    text = "<tool_call>t" + "".join(f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>" for key, value in values.items()) + "</tool_call>"

    (call,) = get_parser("glm47").parse(text, [schema]).calls
    (wrong,) = get_parser("glm47").parse("<tool_call>t<arg_key>b</arg_key><arg_value>five</arg_value></tool_call>", [schema]).calls

    assert json.loads(call.arguments) == {
        "a": "5", "b": 5, "c": True, "d": {"x": [1]}, "e": [], "f": None, "g": 2.5, "h": None, "i": "1", "unknown": 7, "text": '"q"',
    }  # fmt: skip
    assert json.loads(wrong.arguments) == {"b": "five"}


@pytest.mark.parametrize(
    ("family", "formatted"),
    [
        ("hermes", 'Hi.\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'),
        ("qwen", 'Hi.\n<tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</tool_call>'),
        ("longcat", 'Hi.\n<longcat_tool_call>\n{"name": "terminal", "arguments": {"command": "ls"}}\n</longcat_tool_call>'),
        ("mistral", 'Hi.[TOOL_CALLS] [{"name": "terminal", "arguments": {"command": "ls"}, "id": "call_1"}]'),
        ("llama3_json", 'Hi.{"name": "terminal", "parameters": {"command": "ls"}}'),
        (
            "deepseek_v3",
            "Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>terminal\n```json\n"
            '{"command": "ls"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        ),
        ("deepseek_v3_1", 'Hi.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>terminal<｜tool▁sep｜>{"command": "ls"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'),
        (
            "kimi_k2",
            "Hi.<|tool_calls_section_begin|><|tool_call_begin|>functions.terminal:0<|tool_call_argument_begin|>"
            '{"command": "ls"}<|tool_call_end|><|tool_calls_section_end|>',
        ),
        ("glm45", "Hi.\n<tool_call>terminal\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"),
        ("glm47", "Hi.<tool_call>terminal<arg_key>command</arg_key><arg_value>ls</arg_value></tool_call>"),
        ("qwen3_coder", "Hi.\n<tool_call>\n<function=terminal>\n<parameter=command>\nls\n</parameter>\n</function>\n</tool_call>"),
    ],
)
def test_a_message_is_formatted_as_the_chat_template_does(family: str, formatted: str) -> None:
    parser = get_parser(family)

    assert parser.format_message("Hi.", [ParsedCall("call_1", "terminal", '{"command": "ls"}')]) == formatted
    assert parser.format_message("Hi.", []) == "Hi."


def test_an_unknown_family_is_refused_with_the_names_of_the_others() -> None:
    with pytest.raises(
        UnknownParser, match=r"There is no tool call parser 'gpt'. The parsers are: deepseek_v3, deepseek_v3_1, glm45, glm47, hermes, kimi_k2, "
    ):
        get_parser("gpt")

    assert {*PARSERS} == {
        "hermes", "mistral", "llama3_json", "qwen", "qwen3_coder", "deepseek_v3", "deepseek_v3_1", "kimi_k2", "glm45", "glm47", "longcat",
    }  # fmt: skip

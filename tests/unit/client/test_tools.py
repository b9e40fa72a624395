"""Tests of the tools that a model may call: selection, arguments that a model writes, and replies."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from env_client.backend import ExecutionResult
from env_client.leases import BaseLease
from env_client.tools import (
    BASE_TOOLS,
    ENVIRONMENT_ARGUMENTS,
    OPTIONAL_TOOLS,
    TIMEOUT_ARGUMENTS,
    SlotTools,
    available_tools,
    render_tool_reply,
    shortest_timeout_s,
    tool_schemas,
)
from env_client.values import Call, LeaseInfo
from sandbox_server.agent.execution.tools.tool_registry import TOOLS


class RecordingExecutor:
    """Records the calls that it gets, and gives each the same result."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, bool]] = []

    async def execute(self, call: Call, *, tool_from_program: bool = False) -> ExecutionResult:
        self.calls.append((call, tool_from_program))
        return ExecutionResult(True, "done", "", {"reason": "exit", "fault": "none", "exit_code": 0})


@pytest.fixture
def executor() -> RecordingExecutor:
    return RecordingExecutor()


def slot_tools(executor: RecordingExecutor, **options: Any) -> SlotTools:
    return SlotTools(BaseLease(LeaseInfo(lease_id="l-1")), executor, **{"timeout_s": 30.0, **options})


def test_the_base_tools_are_offered_until_a_pool_lists_its_own() -> None:
    assert available_tools({}) == BASE_TOOLS
    assert available_tools({"tools": list(TOOLS)}) == (*BASE_TOOLS, "tmux")


def test_optional_tools_are_offered_by_pools_that_list_them() -> None:
    assert available_tools({"tools": [*TOOLS, "tmux", "terminal_stateful", "bash_stateful", "unheard_of"]}) == BASE_TOOLS + OPTIONAL_TOOLS
    assert available_tools({"tools": ["bash", "terminal", "tmux"]}) == ("terminal", "tmux")


def test_schemas_are_those_of_chat_completions() -> None:
    schemas = tool_schemas(BASE_TOOLS + OPTIONAL_TOOLS)

    assert [schema["function"]["name"] for schema in schemas] == [*BASE_TOOLS, *OPTIONAL_TOOLS]
    for schema in schemas:
        parameters = schema["function"]["parameters"]
        assert (schema["type"], parameters["type"], parameters["additionalProperties"]) == ("function", "object", False)
        assert set(parameters["required"]) <= set(parameters["properties"])
        assert all(rules["type"] and rules["description"] for rules in parameters["properties"].values())
        # Servers of chat completions refuse these at the top of the parameters.
        assert not {"oneOf", "anyOf", "allOf", "not", "enum"} & parameters.keys()
    assert json.loads(json.dumps(schemas)) == schemas


def test_schemas_are_copies() -> None:
    tool_schemas()[0]["function"]["parameters"]["properties"].clear()

    assert tool_schemas()[0]["function"]["parameters"]["properties"]


def test_an_unknown_tool_has_no_schema_and_the_error_names_those_that_have() -> None:
    with pytest.raises(ValueError, match=r"there is no slot tool 'bash', 'web_search'; there are terminal, process, .*tmux"):
        tool_schemas(["terminal", "bash", "web_search"])


def test_no_tool_has_an_argument_about_which_the_environment_decides() -> None:
    names = {name for schema in tool_schemas(BASE_TOOLS + OPTIONAL_TOOLS) for name in schema["function"]["parameters"]["properties"]}

    assert not names & (ENVIRONMENT_ARGUMENTS | TIMEOUT_ARGUMENTS)


async def test_what_the_environment_decides_is_dropped_from_a_models_arguments(executor: RecordingExecutor) -> None:
    tools = slot_tools(executor, output_limit_bytes=1000)
    tries = dict.fromkeys(ENVIRONMENT_ARGUMENTS, True) | {"lease_id": "l-2", "timeout": 10**9, "timeout_s": 10**9, "output_limit_bytes": 10**7}

    result = await tools.run_model_call("terminal", {"command": "ls", "cwd": "/tmp", **tries})

    ((call, tool_from_program),) = executor.calls
    assert (call.lease_id, call.tool, call.args, call.timeout_s, call.output_limit_bytes) == ("l-1", "terminal", {"command": "ls", "cwd": "/tmp"}, 30.0, 1000)
    assert (call.no_output_timeout_s, call.separate_streams, call.encoding, tool_from_program) == (None, None, None, False)
    assert result.metadata["dropped_args"] == sorted(tries)


@pytest.mark.parametrize(
    ("asked", "timeout_s"),
    [(5, 5), (0.5, 0.5), (30.0, 30.0), (31, 30.0), (10**400, 30.0), (0, 30.0), (-1, 30.0), (True, 30.0), ("5", 30.0), (None, 30.0), ([5], 30.0),
     (math.inf, 30.0), (-math.inf, 30.0), (math.nan, 30.0)],
)  # fmt: skip
def test_a_model_can_only_shorten_its_timeout(asked: Any, timeout_s: float) -> None:
    assert shortest_timeout_s(30.0, {"timeout": asked}) == timeout_s
    assert shortest_timeout_s(30.0, {"timeout_s": asked, "timeout": 1000}) == timeout_s


async def test_other_arguments_are_the_services_to_judge(executor: RecordingExecutor) -> None:
    tools = slot_tools(executor)
    given: list[Any] = [{"command": 3, "shell": "zsh"}, "ls", ["ls"], None, {}]

    results = [await tools.run_model_call("terminal", args) for args in given]

    assert [call.args for call, _ in executor.calls] == [{"command": 3, "shell": "zsh"}, "ls", ["ls"], {}, {}]
    assert not any("dropped_args" in result.metadata for result in results)


@pytest.mark.parametrize("tool", ["bash", "tmux", "sudo", "", "\ud83d", 7, None, ["terminal"], {"name": "terminal"}, "x" * 10**6])
async def test_a_tool_that_the_model_may_not_call_is_its_mistake(executor: RecordingExecutor, tool: Any) -> None:
    result = await slot_tools(executor, tools=["terminal", "read_file"]).run_model_call(tool, {"command": "ls"})

    assert (result.success, result.reason, result.fault, executor.calls) == (False, "invalid_args", "policy", [])
    assert result.error.startswith("there is no tool ")
    assert result.error.endswith("; you may call terminal, read_file")
    assert len(result.error.encode()) < 2000


async def test_hooks_may_use_every_tool_and_timeout(executor: RecordingExecutor) -> None:
    tools = slot_tools(executor, tools=["read_file"], output_limit_bytes=1000)

    await tools.exec_tool("bash", {"command": "make"}, timeout=600)
    await tools.exec_tool("bash", {"command": "make", "timeout": 1})

    (first, first_is_ours), (second, _) = executor.calls
    assert (first.tool, first.args, first.timeout_s, first.output_limit_bytes, first_is_ours) == ("bash", {"command": "make"}, 600, None, True)
    assert (second.args, second.timeout_s) == ({"command": "make", "timeout": 1}, 300)


async def test_a_reply_is_json(executor: RecordingExecutor) -> None:
    assert json.loads(await slot_tools(executor).call_tool("terminal", {"command": "ls"})) == {"output": "done", "exit_code": 0}


def test_a_reply_has_what_the_model_needs() -> None:
    def reply(tool: str, success: bool, output: str, error: str = "", **metadata: Any) -> Any:
        return json.loads(render_tool_reply(tool, ExecutionResult(success, output, error, {"lease_id": "l-1", "evidence": {}, **metadata})))

    assert reply("terminal", False, "ü\n", exit_code=3, truncated=False) == {"output": "ü\n", "exit_code": 3}
    assert reply("terminal", False, "a", "it took too long", exit_code=None, truncated=True) == {
        "output": "a", "exit_code": None, "error": "it took too long", "truncated": True,
    }  # fmt: skip
    assert reply("read_file", True, "text", exit_code=0, size_bytes=4) == {"output": "text"}
    assert reply("edit_file", False, "", "not found", exit_code=None) == {"output": "", "error": "not found"}
    assert reply("process", True, "x", exit_code=0, process_id="p-1", state="running", next_offset=1, command="x") == {
        "output": "x", "process_id": "p-1", "state": "running", "next_offset": 1,
    }  # fmt: skip

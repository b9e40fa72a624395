"""The multi-turn loop of an agent: ask the model, execute the tools that it calls, and answer it, until it calls no more tools.

The loop works with every server that answers OpenAI-style chat completions. With a server that parses tool calls itself, the conversation is shortened
where it would exceed the context of the model. With atroposlib's `ManagedServer` the rollout ends there, because its tokens must stay one sequence.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from environments.conversation.answers import Answer, Message, NoAnswer, RequestedCall, read_answer
from environments.conversation.context import TokenCounter, estimate_tokens, shorten_context
from environments.conversation.tool_arguments import ToolArguments, coerce_arguments
from environments.conversation.tool_replies import ToolHandler, ToolReply, error_content, execute_call
from environments.tool_call_parsers import MALFORMED_CALL

__all__ = [
    "AgentLoop", "AgentLoopSettings", "AgentResult", "ChatServer", "LoopEnd", "ModelRequestFailed", "ToolCallRecord", "ToolError", "ToolHandler", "ToolReply",
]  # fmt: skip

#: What the model reads about calls that were not executed because an earlier one met a fault of ours.
_NOT_EXECUTED = "The call was not executed, because the sandbox failed during an earlier call."


#: How many calls of one answer are executed. Turns are limited too, and an answer with thousands of calls would hold its slot and its group for very long.
MAX_CALLS_PER_ANSWER = 128


class ModelRequestFailed(Exception):
    """The model server returned an error, or no message. It is no fault of the model: the rollout must not be scored."""


class ChatServer(Protocol):
    """A model server, such as a server manager or a managed server of atroposlib."""

    async def chat_completion(self, **request: Any) -> Any:
        """Answer a conversation. `request` has the members of an OpenAI-style chat completion. The answer may be an object or a dictionary."""


class LoopEnd(enum.StrEnum):
    """Why a rollout ended."""

    #: The model called no more tools.
    ANSWERED = "answered"
    #: The model used all of its turns.
    MAX_TURNS = "max_turns"
    #: The conversation no longer fits into the context of the model.
    CONTEXT_FULL = "context_full"
    #: The answer reached its limit of tokens and called no tool.
    OUTPUT_LIMIT = "output_limit"
    #: A tool call ended with a fault of ours, so the rollout must not be scored.
    INFRA_FAULT = "infra_fault"


@dataclass(frozen=True, slots=True)
class AgentLoopSettings:
    """How the loop asks the model.

    Args:
        max_turns: the most answers of the model.
        temperature: the sampling temperature.
        max_tokens: the most tokens of one answer; None for the default of the server.
        tool_delay_s: how long the loop waits before each tool call, in seconds.
        max_context_tokens: the most tokens of a conversation; None for no limit.
        shortens_context: whether a longer conversation is shortened for the model; otherwise the rollout ends.
        request_options: further members of each request.
    """

    max_turns: int = 30
    temperature: float = 1.0
    max_tokens: int | None = None
    tool_delay_s: float = 0.0
    max_context_tokens: int | None = None
    shortens_context: bool = True
    request_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ToolCallRecord:
    """One tool call of the model.

    Args:
        turn: the turn, counted from 1.
        tool: the name of the tool; empty if the model did not name one.
        arguments: the arguments as the model wrote them.
        schema_valid: whether the arguments were a JSON object, for a tool that exists.
        executed: whether the handler was called.
        reply: what the call came to.
    """

    turn: int
    tool: str
    arguments: str
    schema_valid: bool
    executed: bool
    reply: ToolReply


@dataclass(frozen=True, slots=True)
class ToolError:
    """An error of a tool call.

    Args:
        turn: the turn, counted from 1.
        tool: the name of the tool.
        arguments: the arguments as the model wrote them.
        error: one sentence.
        result: what the model was answered.
    """

    turn: int
    tool: str
    arguments: str
    error: str
    result: str


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What a rollout came to.

    Args:
        messages: the whole conversation. It is never shortened.
        end: why the rollout ended.
        turns_used: how many answers the model gave.
        reasoning_per_turn: the reasoning of each answer that the server returned beside the text, or None.
        calls: the tool calls in order.
        model_time_s: how long the loop waited for the model, in seconds.
        tool_time_s: how long it waited for tools, in seconds.
        managed_state: the state of a managed server at the end, with its tokens; None for other servers.
    """

    messages: list[Message]
    end: LoopEnd
    turns_used: int
    reasoning_per_turn: tuple[str | None, ...]
    calls: tuple[ToolCallRecord, ...]
    model_time_s: float
    tool_time_s: float
    managed_state: Mapping[str, Any] | None = None

    @property
    def finished_naturally(self) -> bool:
        """Whether the model ended the rollout itself."""
        return self.end is LoopEnd.ANSWERED

    @property
    def tool_errors(self) -> list[ToolError]:
        """The errors of tool calls, also of those that were not executed."""
        return [ToolError(call.turn, call.tool, call.arguments, call.reply.error, call.reply.content) for call in self.calls if not call.reply.ok]

    @property
    def tool_calls_attempted(self) -> int:
        """How many tools the model called."""
        return len(self.calls)

    @property
    def tool_calls_schema_valid(self) -> int:
        """How many of the calls named a tool that exists, with a JSON object as arguments."""
        return sum(call.schema_valid for call in self.calls)

    @property
    def tool_calls_executed_ok(self) -> int:
        """How many of the calls were executed and did what they were asked to do."""
        return sum(call.executed and call.reply.ok for call in self.calls)

    @property
    def tool_calls_exec_error(self) -> int:
        """How many of the calls were executed and failed."""
        return sum(call.executed and not call.reply.ok for call in self.calls)


class AgentLoop:
    """Rolls out one conversation at a time.

    Args:
        server: the model server.
        handler: executes the tool calls.
        tools: the OpenAI-style schemas of the tools that the model may call.
        settings: how the loop asks the model.
        count_tokens: counts the tokens of a conversation. It is used only with `max_context_tokens`.
        sleep: waits; replaced in tests.
        clock: returns the time in seconds; replaced in tests.
    """

    def __init__(
        self,
        server: ChatServer,
        handler: ToolHandler,
        tools: Sequence[Mapping[str, Any]],
        settings: AgentLoopSettings | None = None,
        *,
        count_tokens: TokenCounter = estimate_tokens,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._handler = handler
        self._tools = [dict(tool) for tool in tools]
        self._tool_names = sorted(str(tool["function"]["name"]) for tool in tools)
        self._settings = settings or AgentLoopSettings()
        self._count_tokens = count_tokens
        self._sleep = sleep
        self._clock = clock

    async def run(self, messages: Sequence[Message], task_id: str) -> AgentResult:
        """Roll out a conversation.

        Args:
            messages: its first messages; they are not changed.
            task_id: the trajectory.

        Raises:
            ModelRequestFailed: the model server returned an error, or no message.
        """
        rollout = _Rollout(list(messages), task_id)
        end = LoopEnd.MAX_TURNS
        while rollout.turn < self._settings.max_turns:
            request = self._context(rollout.messages)
            if request is None:
                end = LoopEnd.CONTEXT_FULL
                break
            answer = await self._ask_model(rollout, request)
            rollout.messages.append(answer.as_message())
            if not answer.calls:
                end = LoopEnd.OUTPUT_LIMIT if self._finish_reason(answer) == "length" else LoopEnd.ANSWERED
                break
            if not await self._execute_calls(rollout, answer.calls):
                end = LoopEnd.INFRA_FAULT
                break
        return rollout.result(end, self._managed_state())

    def _context(self, messages: list[Message]) -> list[Message] | None:
        """Return the messages for the next request, or None if they do not fit into the context of the model."""
        most = self._settings.max_context_tokens
        if most is None:
            return list(messages)
        if self._settings.shortens_context:
            return shorten_context(messages, most, self._count_tokens)
        return list(messages) if self._count_tokens(messages) <= most else None

    async def _ask_model(self, rollout: _Rollout, messages: list[Message]) -> Answer:
        settings = self._settings
        request: dict[str, Any] = {"messages": messages, "n": 1, "temperature": settings.temperature, **settings.request_options}
        if self._tools:
            request["tools"] = self._tools
        if settings.max_tokens is not None:
            request["max_tokens"] = settings.max_tokens
        rollout.turn += 1
        began = self._clock()
        try:
            answer = read_answer(await self._server.chat_completion(**request))
        except NoAnswer as error:
            raise ModelRequestFailed(f"The model server gave no answer in turn {rollout.turn}: {error}.") from error
        except Exception as error:  # each server has exceptions of its own
            last = _last_attempt(error)
            raise ModelRequestFailed(f"The request to the model server failed in turn {rollout.turn}: {type(last).__name__}: {last}") from error
        rollout.model_time_s += self._clock() - began
        rollout.reasoning.append(answer.reasoning)
        return answer

    async def _execute_calls(self, rollout: _Rollout, calls: Sequence[RequestedCall]) -> bool:
        """Execute the calls of an answer one after another. Returns whether the rollout can go on."""
        failed = False
        for number, call in enumerate(calls, 1):
            if failed:
                record = _refused(rollout.turn, call.name, call.arguments, _NOT_EXECUTED, fault="infra")
            elif number > MAX_CALLS_PER_ANSWER:
                error = f"The call was not executed, because an answer may have at most {MAX_CALLS_PER_ANSWER} calls."
                record = _refused(rollout.turn, call.name, call.arguments, error)
            else:
                record = await self._execute_call(rollout, call)
            failed = failed or record.reply.fault == "infra"
            rollout.calls.append(record)
            rollout.messages.append({"role": "tool", "tool_call_id": call.call_id, "name": call.name, "content": record.reply.content})
        return not failed

    async def _execute_call(self, rollout: _Rollout, call: RequestedCall) -> ToolCallRecord:
        arguments = coerce_arguments(call.name, call.arguments)
        if call.name == MALFORMED_CALL:
            return _malformed(rollout.turn, arguments)
        if call.name not in self._tool_names:
            return _refused(rollout.turn, call.name, call.arguments, f"Unknown tool {call.name!r}. The available tools are: {', '.join(self._tool_names)}.")
        if arguments.problem:
            return _refused(rollout.turn, call.name, call.arguments, arguments.problem)
        if self._settings.tool_delay_s > 0:
            await self._sleep(self._settings.tool_delay_s)
        began = self._clock()
        reply = await execute_call(self._handler, call.name, arguments.args, rollout.task_id)
        rollout.tool_time_s += self._clock() - began
        return ToolCallRecord(rollout.turn, call.name, call.arguments, arguments.schema_valid, executed=True, reply=reply)

    def _finish_reason(self, answer: Answer) -> str:
        """Return why the generation ended. A managed server with a translator says it in its latest node alone."""
        state = self._managed_state()
        nodes = state.get("nodes") if state else None
        metadata = getattr(nodes[-1], "metadata", None) if nodes else None
        return str(metadata["finish_reason"]) if metadata and "finish_reason" in metadata else answer.finish_reason

    def _managed_state(self) -> Mapping[str, Any] | None:
        get_state = getattr(self._server, "get_state", None)
        return get_state() if get_state else None


@dataclass(slots=True)
class _Rollout:
    """What a rollout has come to so far."""

    messages: list[Message]
    task_id: str
    turn: int = 0
    reasoning: list[str | None] = field(default_factory=list)
    calls: list[ToolCallRecord] = field(default_factory=list)
    model_time_s: float = 0.0
    tool_time_s: float = 0.0

    def result(self, end: LoopEnd, managed_state: Mapping[str, Any] | None) -> AgentResult:
        return AgentResult(
            messages=self.messages,
            end=end,
            turns_used=self.turn,
            reasoning_per_turn=tuple(self.reasoning),
            calls=tuple(self.calls),
            model_time_s=self.model_time_s,
            tool_time_s=self.tool_time_s,
            managed_state=managed_state,
        )


def _last_attempt(error: Exception) -> BaseException:
    """Return the error of the last attempt, where the server retries by itself and raises an error that does not say what happened, as atroposlib does."""
    last: BaseException = error
    while (attempt := getattr(last, "last_attempt", None)) is not None and (inner := attempt.exception()) is not None:
        last = inner
    return last


def _malformed(turn: int, arguments: ToolArguments) -> ToolCallRecord:
    """Return the record of a call that the translator could not parse."""
    args = arguments.args
    return _refused(turn, str(args.get("tool", "")), str(args.get("text", "")), str(args.get("problem", "The tool call could not be parsed.")))


def _refused(turn: int, tool: str, arguments: str, error: str, fault: str = "policy") -> ToolCallRecord:
    """Return the record of a call that is not executed."""
    reply = ToolReply(error_content(error), ok=False, error=error, fault=fault, reason="not_executed")
    return ToolCallRecord(turn, tool, arguments, schema_valid=False, executed=False, reply=reply)

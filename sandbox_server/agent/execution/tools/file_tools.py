"""The file tools. A forked child of init runs each of them inside the slot, with the rights of the slot."""

from __future__ import annotations

import functools
import os
from typing import Any, Mapping

from sandbox_server.agent.errors import InvalidArgs
from sandbox_server.agent.execution.processes.spawn_spec import forked_tool_spec
from sandbox_server.agent.execution.reply_parser import ReplyParser
from sandbox_server.agent.execution.tools.tool import HandledCall, Tool
from sandbox_server.agent.inslot.arguments import check_args


class FileToolCall:
    """One call of a file tool.

    Args:
        tool: the name of the tool.
        args: its arguments, checked.
    """

    def __init__(self, tool: str, args: Mapping[str, Any]) -> None:
        self._tool = tool
        self._args = args
        self._reply: ReplyParser | None = None

    def start_call(self, call: HandledCall) -> None:
        """See `ToolHandler`."""
        self._reply = ReplyParser(call.sinks[0])
        call.start_process(forked_tool_spec(self._tool, self._args), [self._reply])

    def on_process_ended(self, call: HandledCall, status: int) -> None:
        """See `ToolHandler`."""
        header = self._reply.header if self._reply is not None else None
        if header is None or (header.get("ok") and status != 0):
            exit_code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else 1
            reason, error, metadata = call.judge_exit(status, exit_code)
            if reason == "exit":
                reason, error = "tool_error", "%s ended before it had finished" % self._tool
            call.finish_call(reason, error=error, metadata=metadata)
        elif header.get("ok"):
            call.finish_call("exit", exit_code=0, tool_ok=True, metadata={key: value for key, value in header.items() if key != "ok"})
        else:
            reason = "invalid_args" if header.get("code") == "invalid_args" else "tool_error"
            facts = {"errno": header["errno"]} if "errno" in header else {}
            call.finish_call(reason, error=str(header.get("detail", "")), metadata={**facts, "evidence": facts or {"tool": self._tool}})


def _parse(tool: str, args: Mapping[str, Any]) -> FileToolCall:
    problem = check_args(tool, args)
    if problem is not None:
        raise InvalidArgs(problem)
    return FileToolCall(tool, args)


FILE_TOOLS = tuple(Tool(name, functools.partial(_parse, name)) for name in ("read_file", "write_file", "edit_file", "list_files", "search_files"))

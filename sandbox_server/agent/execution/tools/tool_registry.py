"""Which tools there are, and what a call of each becomes."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Union

from sandbox_server.agent.errors import InvalidArgs, UnknownTool
from sandbox_server.agent.execution.tools import shell
from sandbox_server.agent.inslot import arguments

FILE_TOOLS = ("read_file", "write_file", "edit_file", "list_files", "search_files")
TOOLS = ("bash", "terminal", "process", *FILE_TOOLS)
NOT_BUILT = ("bash_stateful", "terminal_stateful", "tmux")


class NotBuilt(Exception):
    """A tool of the contract that this agent does not have yet."""


class ToolError(Exception):
    """A tool could not do what was asked; the text says why."""


@dataclasses.dataclass(frozen=True)
class FileTool:
    """One file operation, done by a forked child of init inside the slot."""

    tool: str
    args: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class JobAction:
    """One action of the tool `process`."""

    action: str
    process_id: str | None = None
    command: shell.Command | None = None
    offset: int = 0
    data: bytes = b""


Plan = Union[shell.Command, FileTool, JobAction]


def plan(tool: str, args: Mapping[str, Any]) -> Plan:
    """What a call becomes.

    Raises:
        UnknownTool: there is no such tool.
        InvalidArgs: an argument does not fit.
        NotBuilt: the tool exists in the contract only.
    """
    if tool in ("bash", "terminal"):
        return shell.bash(args)
    if tool in FILE_TOOLS:
        fault = arguments.check_args(tool, args)
        if fault is not None:
            raise InvalidArgs(fault)
        return FileTool(tool, args)
    if tool == "process":
        from sandbox_server.agent.execution.tools import jobs

        return jobs.parse(args)
    if tool in NOT_BUILT:
        raise NotBuilt("the tool %s is not built yet" % tool)
    raise UnknownTool("there is no tool %s" % ascii(tool))

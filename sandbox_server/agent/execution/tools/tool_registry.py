"""All tools, by name. A new tool is one module beside this one, and its `Tool` in the list below."""

from __future__ import annotations

from sandbox_server.agent.errors import InvalidArgs, UnknownTool
from sandbox_server.agent.execution.tmux.availability import check_version, find_tmux_version
from sandbox_server.agent.execution.tools import file_tools, process, shell, stateful_shell, tmux
from sandbox_server.agent.execution.tools.tool import Tool

_BUILT = (shell.BASH, shell.TERMINAL, stateful_shell.BASH_STATEFUL, stateful_shell.TERMINAL_STATEFUL, process.PROCESS, tmux.TMUX, *file_tools.FILE_TOOLS)
TOOLS = tuple(tool.name for tool in _BUILT)
_BY_NAME = {tool.name: tool for tool in _BUILT}


def available_tools(path: str) -> tuple[str, ...]:
    """The tools that work here: all that are built, without `tmux` where there is no tmux that it can use.

    Args:
        path: the folders in which slots search programs, as in the variable `PATH`.
    """
    try:
        check_version(find_tmux_version(path))
    except InvalidArgs:
        return tuple(tool for tool in TOOLS if tool != "tmux")
    return TOOLS


def find_tool(name: str) -> Tool:
    """Return the tool with this name.

    Raises:
        UnknownTool: there is none.
    """
    tool = _BY_NAME.get(name)
    if tool is None:
        raise UnknownTool("there is no tool %s" % ascii(name))
    return tool

"""The tools `bash_stateful` and `terminal_stateful`: commands of one session run one after another in a shell that stays."""

from __future__ import annotations

import re
from typing import Any, Mapping

from sandbox_server.agent.errors import InvalidArgs, ToolError
from sandbox_server.agent.execution.tools.argument_checks import check_names, check_text_without_nul
from sandbox_server.agent.execution.tools.shell import MAX_COMMAND_BYTES
from sandbox_server.agent.execution.tools.tool import HandledCall, Tool

DEFAULT_SESSION = "default"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")


class StatefulShellCall:
    """One call.

    Args:
        command: the command.
        session: the name of its session.
    """

    def __init__(self, command: bytes, session: str) -> None:
        self.command = command
        self.session = session

    def start_call(self, call: HandledCall) -> None:
        """See `ToolHandler`."""
        try:
            call.run_in_session(self.session, self.command)
        except ToolError as error:
            call.finish_call("tool_error", error=str(error), metadata={"evidence": {"tool": "sessions", "ran": False}})

    def on_process_ended(self, call: HandledCall, status: int) -> None:
        """See `ToolHandler`. It is the command that has ended, and sometimes the shell with it."""
        call.finish_by_status(status)


def parse_stateful_shell(name: str, args: Mapping[str, Any]) -> StatefulShellCall:
    """Check the arguments of a call.

    Args:
        name: the tool.
        args: the arguments.

    Raises:
        InvalidArgs: an argument is not valid; the text names it.
    """
    check_names(name, args, ("command",), ("session",))
    command = check_text_without_nul("command", args["command"], MAX_COMMAND_BYTES)
    session = args.get("session")
    if session is None:
        session = DEFAULT_SESSION
    if not isinstance(session, str) or _NAME.match(session) is None:
        raise InvalidArgs("session must be 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return StatefulShellCall(command, session)


BASH_STATEFUL = Tool("bash_stateful", lambda args: parse_stateful_shell("bash_stateful", args))
TERMINAL_STATEFUL = Tool("terminal_stateful", lambda args: parse_stateful_shell("terminal_stateful", args))

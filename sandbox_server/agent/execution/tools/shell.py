"""The tools `bash` and `terminal`: every call runs one command in a new shell."""

from __future__ import annotations

import dataclasses
import os
from typing import Any, Mapping

from sandbox_server.agent.execution.processes.spawn_spec import SpawnSpec, program_spec
from sandbox_server.agent.execution.tools.argument_checks import check_names, check_text, check_text_without_nul, parse_environment
from sandbox_server.agent.execution.tools.tool import HandledCall, Tool

MAX_COMMAND_BYTES = 1 << 20
MAX_STDIN_BYTES = 10 << 20
MAX_CWD_BYTES = 4095
# Linux limits one argument of a program to 128 KiB. A longer command is read from a file in memory instead.
_MAX_ARGUMENT_BYTES = 100_000
_READ_SCRIPT = b'eval "exec 3<&-\n$(</dev/fd/3)"'


@dataclasses.dataclass(frozen=True)
class ShellCommand:
    """A shell command.

    Args:
        args: the arguments of the shell.
        env: further environment variables.
        cwd: the working directory, relative to the workspace; None: the workspace.
        stdin: what the command reads as its standard input.
        script: the command itself, if it is too long for an argument.
    """

    args: tuple[bytes, bytes]
    env: Mapping[str, str] | None
    cwd: str | None
    stdin: bytes | None
    script: bytes | None

    def text(self) -> str:
        """The command for a person to read."""
        return (self.script if self.script is not None else self.args[1]).decode("utf-8", "replace")

    def to_spawn_spec(self, shell: str, workspace: str, **fields: Any) -> SpawnSpec:
        """What init is asked to start.

        Args:
            shell: the path of the shell as the slot sees it.
            workspace: the path of the workspace as the slot sees it.
            fields: further fields of the spec.
        """
        cwd = workspace if self.cwd is None else os.path.join(workspace, self.cwd)
        return program_spec([shell, *self.args], self.env, cwd, script=self.script, **fields)


def parse_command(text: Any, args: Mapping[str, Any], name: str = "command") -> ShellCommand:
    """Check a shell command and the arguments that go with it.

    Args:
        text: the command.
        args: may have `env`, `cwd` and `stdin`.
        name: what the argument with the command is called.

    Raises:
        InvalidArgs: an argument is not valid; the text names it.
    """
    data = check_text_without_nul(name, text, MAX_COMMAND_BYTES)
    env, cwd, stdin = args.get("env"), args.get("cwd"), args.get("stdin")
    is_long = len(data) > _MAX_ARGUMENT_BYTES
    if cwd is not None:
        check_text_without_nul("cwd", cwd, MAX_CWD_BYTES)
    return ShellCommand(
        args=(b"-c", _READ_SCRIPT if is_long else data),
        env=parse_environment(env) if env is not None else None,
        cwd=cwd or None,
        stdin=check_text("stdin", stdin, MAX_STDIN_BYTES) if stdin is not None else None,
        script=data if is_long else None,
    )


def parse_bash(args: Mapping[str, Any]) -> ShellCommand:
    """Check the arguments of `bash`.

    Raises:
        InvalidArgs: an argument is not valid; the text names it.
    """
    check_names("bash", args, ("command",), ("cwd", "env", "stdin"))
    return parse_command(args["command"], args)


class BashCall:
    """One call of `bash`."""

    def __init__(self, command: ShellCommand) -> None:
        self._command = command

    def start_call(self, call: HandledCall) -> None:
        """See `ToolHandler`."""
        spec = self._command.to_spawn_spec(call.runtime.shell, call.runtime.workspace, stdin=self._command.stdin)
        call.start_process(spec, call.sinks)

    def on_process_ended(self, call: HandledCall, status: int) -> None:
        """See `ToolHandler`."""
        call.finish_by_status(status)


def _parse(args: Mapping[str, Any]) -> BashCall:
    return BashCall(parse_bash(args))


BASH = Tool("bash", _parse)
TERMINAL = Tool("terminal", _parse)

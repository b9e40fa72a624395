"""What a process in a slot is started with."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Sequence

PIPES, TTY = "pipes", "tty"


@dataclasses.dataclass(frozen=True)
class SpawnSpec:
    """One process that init is asked to start. Make it with `program_spec` or `forked_tool_spec`.

    Args:
        request: the request to init, without `id` and `fds`.
        stdio: what the process has as standard input, output and error: `pipes`, or `tty`, a terminal of the slot.
        stdin: the whole input, if it is known beforehand.
        has_stdin_pipe: whether the agent writes to the process's standard input while it runs.
        script: what the process finds at file descriptor 3.
        stdin_fd: a descriptor that the process gets as its standard input. The caller still closes it.
        script_fd: a descriptor that the process gets as descriptor 3. The caller still closes it.
        has_own_group: whether the process gets a control group (a leaf) of its own, where the slot has such groups.
    """

    request: Mapping[str, Any]
    stdio: str = PIPES
    stdin: bytes | None = None
    has_stdin_pipe: bool = False
    script: bytes | None = None
    stdin_fd: int | None = None
    script_fd: int | None = None
    has_own_group: bool = True


def program_spec(argv: Sequence[Any], env: Mapping[str, str] | None, cwd: str, *, outlives_calls: bool = False, **fields: Any) -> SpawnSpec:
    """A program that init executes.

    Args:
        argv: the program and its arguments.
        env: variables beyond those that every process of the slot has.
        cwd: the working directory as the slot sees it.
        outlives_calls: whether calls begin and end while it runs. The end of its tree leaves alone what may belong to one of them.
        fields: further fields of `SpawnSpec`.
    """
    request = {"op": "spawn", "argv": list(argv), "env": dict(env) if env else None, "cwd": cwd, "outlives_calls": outlives_calls}
    return SpawnSpec(request, **fields)


def forked_tool_spec(tool: str, args: Mapping[str, Any], **fields: Any) -> SpawnSpec:
    """A tool of `agent.inslot` that a forked child of init runs.

    Args:
        tool: the name of the tool.
        args: its arguments.
        fields: further fields of `SpawnSpec`.
    """
    return SpawnSpec({"op": "fork", "tool": tool, "args": dict(args), "env": None}, **fields)

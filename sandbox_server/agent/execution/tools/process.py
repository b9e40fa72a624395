"""The tool `process`: starts jobs, and inspects, feeds and kills them later."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

from sandbox_server.agent.errors import InvalidArgs, ToolError
from sandbox_server.agent.execution.jobs import Job
from sandbox_server.agent.execution.tools.argument_checks import check_names, check_text
from sandbox_server.agent.execution.tools.shell import ShellCommand, parse_command
from sandbox_server.agent.execution.tools.tool import HandledCall, Tool, ToolCapabilities

MAX_DATA_BYTES = 1 << 20
_ACTIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (("action", "command"), ()),
    "list": (("action",), ()),
    "poll": (("action", "process_id"), ()),
    "log": (("action", "process_id"), ("offset",)),
    "write": (("action", "process_id", "data"), ()),
    "kill": (("action", "process_id"), ()),
}
"""Action -> its required and its optional arguments."""


@dataclasses.dataclass(frozen=True)
class JobAction:
    """One action on jobs.

    Args:
        action: one of `_ACTIONS`.
        process_id: the job; None for `start` and `list`.
        command: what to start.
        offset_bytes: where to begin to read the output.
        data: what to write to the standard input.
    """

    action: str
    process_id: str | None = None
    command: ShellCommand | None = None
    offset_bytes: int = 0
    data: bytes = b""


def parse_job_action(args: Mapping[str, Any]) -> JobAction:
    """Check the arguments of `process`.

    Raises:
        InvalidArgs: an argument is not valid; the text names it.
    """
    action = args.get("action")
    if not isinstance(action, str) or action not in _ACTIONS:
        raise InvalidArgs("action must be one of %s" % ", ".join(_ACTIONS))
    check_names("process %s" % action, args, *_ACTIONS[action])
    process_id = args.get("process_id")
    if process_id is not None and not isinstance(process_id, str):
        raise InvalidArgs("process_id must be a string")
    offset = args.get("offset")
    if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int) or offset < 0):
        raise InvalidArgs("offset must be an integer from 0 on")
    return JobAction(
        action=action,
        process_id=process_id,
        command=parse_command(args["command"], {}) if action == "start" else None,
        offset_bytes=offset or 0,
        data=check_text("data", args["data"], MAX_DATA_BYTES) if action == "write" else b"",
    )


class ProcessToolCall:
    """One call of `process`. It ends at once."""

    def __init__(self, action: JobAction) -> None:
        self._action = action

    def start_call(self, call: HandledCall) -> None:
        """See `ToolHandler`."""
        try:
            text, metadata = self._act(call)
        except ToolError as error:
            call.finish_call("tool_error", error=str(error), metadata={"evidence": {"tool": "process %s" % self._action.action}})
            return
        call.sinks[0].write(text)
        call.finish_call("exit", exit_code=0, tool_ok=True, metadata=metadata)

    def on_process_ended(self, call: HandledCall, status: int) -> None:
        """See `ToolHandler`. A call of this tool has no process."""

    def _act(self, call: HandledCall) -> tuple[bytes, dict[str, Any]]:
        """Do the action. Returns the output of the call, and its metadata."""
        action, jobs = self._action, call.lease.jobs
        if action.command is not None:
            return _describe(_start_job(call, action.command))
        if action.action == "list":
            described = [job.describe() for job in jobs.list_jobs()]
            text = "".join("%(process_id)s  %(state)s  %(command)s\n" % job for job in described)
            return text.encode("utf-8", "surrogateescape"), {"processes": described}
        job = jobs.find_job(action.process_id)
        if action.action == "log":
            data = job.read_log(action.offset_bytes)
            return data, dict(job.describe(), offset=action.offset_bytes, next_offset=action.offset_bytes + len(data))
        if action.action == "write":
            job.write_input(action.data)
        elif action.action == "kill":
            job.kill_job()
        return _describe(job)


def _start_job(call: HandledCall, command: ShellCommand) -> Job:
    call.lease.jobs.check_can_start()
    call.lease.mark_live_calls_concurrent()
    spec = command.to_spawn_spec(call.runtime.shell, call.runtime.workspace, has_stdin_pipe=True)
    return call.lease.jobs.start_job(call.runtime, command.text(), spec)


def _describe(job: Job) -> tuple[bytes, dict[str, Any]]:
    state = job.describe()
    exit_code = "" if state["exit_code"] is None else " with exit code %d" % state["exit_code"]
    return ("process %s: %s%s\n" % (state["process_id"], state["state"], exit_code)).encode(), state


def _parse(args: Mapping[str, Any]) -> ProcessToolCall:
    return ProcessToolCall(parse_job_action(args))


PROCESS = Tool("process", _parse, ToolCapabilities(has_process=False))

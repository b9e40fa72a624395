"""The tools that a model may call in a slot: their schemas as OpenAI-style functions, and their dispatch into a lease.

The environment decides about the network, the sandbox and the longest timeout of a call. What a model writes about them is dropped.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from env_client.backend import ExecutionResult
from env_client.leases import BaseLease
from env_client.values import Call, Fault, Reason

#: The arguments with which a model may ask for a shorter timeout, in seconds.
TIMEOUT_ARGUMENTS = frozenset({"timeout", "timeout_s"})
#: Arguments about which the environment decides. No tool has them; a model that writes them all the same neither gets nor loses anything by it.
ENVIRONMENT_ARGUMENTS = frozenset(
    {
        "allow_hosts", "allow_network", "allow_none", "allow_private", "cache", "call_id", "dedicated", "encoding", "image", "isolation", "labels", "lease_id",
        "network", "no_output_timeout_s", "output_limit_bytes", "pool", "priority", "privileged", "read_only", "request_key", "require_sandbox",
        "require_stateful_sandbox", "root", "run_id", "sandbox_id", "separate_streams", "slot_id", "task_id", "tenant", "timeout_ms", "trajectory_id", "ttl_s",
        "wait_s",
    }
)  # fmt: skip

_LINE = {"type": "integer", "minimum": 0, "maximum": 1_000_000_000}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 10_000}


def _text(description: str, **rules: Any) -> dict[str, Any]:
    return {"type": "string", "description": description, **rules}


def _function(name: str, description: str, required: Sequence[str] = (), **properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_COMMAND = _text("The command, as bash -c runs it.")
_PATH = {"type": "string", "minLength": 1}

_TERMINAL = _function(
    "terminal",
    "Run a shell command in the workspace and return its output and exit code. Each call is a new shell: the working folder and variables of earlier calls "
    "are gone, files stay. A process that the command leaves in the background runs on.",
    ("command",),
    command=_COMMAND,
    cwd=_text("The working folder, relative to the workspace or absolute. Default: the workspace."),
    env={"type": "object", "additionalProperties": {"type": "string"}, "description": "Further environment variables of the command."},
    stdin=_text("What the command reads as its standard input. Default: nothing."),
)
_PROCESS = _function(
    "process",
    "Start a command as a background job, and look at it later. start (command) returns a process_id; list shows all jobs; poll (process_id) says whether a "
    "job still runs; log (process_id, offset) returns its output; write (process_id, data) writes to its standard input; kill (process_id) ends it.",
    ("action",),
    action={"type": "string", "enum": ["start", "list", "poll", "log", "write", "kill"], "description": "What to do."},
    command=_text("start: the command, as bash -c runs it."),
    process_id=_text("poll, log, write, kill: the job."),
    offset={"type": "integer", "minimum": 0, "description": "log: the byte of the output from which to read. Default: 0."},
    data=_text("write: the text, with a newline at its end where the program reads lines."),
)
_READ_FILE = _function(
    "read_file",
    "Read a text file, or some of its lines.",
    ("path",),
    path={**_PATH, "description": "The file, relative to the workspace or absolute."},
    offset={**_LINE, "description": "The first line to read. Default: the beginning of the file."},
    limit={**_LINE, "minimum": 1, "description": "How many lines to read. Default: all."},
)
_WRITE_FILE = _function(
    "write_file",
    "Create or replace a file. Missing parent folders are created.",
    ("path", "content"),
    path={**_PATH, "description": "The file, relative to the workspace or absolute."},
    content=_text("The whole content of the file."),
    mode=_text('The permissions in octal digits, such as "0755".', pattern="^0{0,2}[0-7]{1,3}$"),
)
_EDIT_FILE = _function(
    "edit_file",
    "Replace text in a file. The old text must be in the file exactly once, unless replace_all is true.",
    ("path", "old", "new"),
    path={**_PATH, "description": "The file, relative to the workspace or absolute."},
    old=_text("The text to replace, exactly as it is in the file, with its indentation.", minLength=1),
    new=_text("The text that replaces it; it must differ from the old one."),
    replace_all={"type": "boolean", "description": "Replace every occurrence. Default: false."},
)
_LIST_FILES = _function(
    "list_files",
    "List the files of a folder.",
    path={**_PATH, "description": "The folder, relative to the workspace or absolute. Default: the workspace."},
    recursive={"type": "boolean", "description": "Include everything below the folder. Default: false."},
    max_entries={**_COUNT, "description": "How many entries to return at most."},
)
_SEARCH_FILES = _function(
    "search_files",
    "Search the lines of a file, or of all files below a folder, with a regular expression.",
    ("pattern",),
    pattern=_text("The regular expression, in the syntax of Python.", minLength=1),
    path={**_PATH, "description": "The file or folder, relative to the workspace or absolute. Default: the workspace."},
    glob=_text("Search only files whose name matches, such as *.py.", minLength=1),
    max_matches={**_COUNT, "description": "How many matching lines to return at most."},
)
_TERMINAL_STATEFUL = _function(
    "terminal_stateful",
    "Run a shell command in a shell that stays: its working folder, variables, functions and background jobs are those that earlier calls left. The standard "
    "input of commands is empty. A command that takes too long is interrupted. If the shell is lost, session_reason says so, and the next one is new.",
    ("command",),
    command=_text("The command."),
    session=_text("The name of the shell, where several are needed. Default: the one shell.", pattern="^[A-Za-z0-9._-]{1,64}$"),
)
_TMUX = _function(
    "tmux",
    "Use a terminal for full-screen and interactive programs. send_keys types and returns the screen; capture returns the screen; resize changes its size; "
    "reset starts a new one.",
    ("action",),
    action={"type": "string", "enum": ["send_keys", "capture", "resize", "reset"], "description": "What to do."},
    keys={
        "type": ["string", "array"],
        "items": {"type": "string"},
        "description": "send_keys: one or several of: names of keys such as Enter, Escape, C-c, Up, or text. Enter is a key of its own.",
    },
    block={"type": "boolean", "description": "Wait until the program waits for the next keys. Default: false."},
    min_wait_s={"type": "number", "minimum": 0, "description": "How long to wait at least before the screen is captured, in seconds."},
    max_wait_s={"type": "number", "minimum": 0, "description": "With block: how long to wait at most, in seconds."},
    capture_entire={"type": "boolean", "description": "Return what has scrolled out of the screen, too."},
    capture_incremental={"type": "boolean", "description": "Return only what is new since the last result."},
    pane_width={"type": "integer", "minimum": 10, "maximum": 500, "description": "Changes the number of columns."},
    pane_height={"type": "integer", "minimum": 2, "maximum": 300, "description": "Changes the number of lines."},
)

#: The tools of every pool.
BASE_TOOLS = ("terminal", "process", "read_file", "write_file", "edit_file", "list_files", "search_files")
#: The tools of pools whose capabilities list them.
OPTIONAL_TOOLS = ("terminal_stateful", "tmux")
_FUNCTIONS: Mapping[str, Mapping[str, Any]] = {
    function["function"]["name"]: function
    for function in (_TERMINAL, _PROCESS, _READ_FILE, _WRITE_FILE, _EDIT_FILE, _LIST_FILES, _SEARCH_FILES, _TERMINAL_STATEFUL, _TMUX)
}
#: The members of a result's metadata that a model needs for its next call, for each tool that has some.
_REPLY_METADATA: Mapping[str, tuple[str, ...]] = {
    "process": ("process_id", "state", "next_offset"),
    "bash_stateful": ("session_reason",),
    "terminal_stateful": ("session_reason",),
    "tmux": ("settled", "terminal"),
}
_COMMAND_TOOLS = frozenset({"bash", "terminal", "bash_stateful", "terminal_stateful"})


def available_tools(capabilities: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the slot tools that a model can use in a pool.

    Args:
        capabilities: the capabilities of the pool (`PoolInfo.capabilities`). If they list no tools, because no sandbox of the pool has started yet, the
            base tools are returned.
    """
    listed = capabilities.get("tools")
    if not isinstance(listed, list | tuple):
        return BASE_TOOLS
    return tuple(tool for tool in (*BASE_TOOLS, *OPTIONAL_TOOLS) if tool in listed)


def tool_schemas(tools: Collection[str] = BASE_TOOLS) -> list[dict[str, Any]]:
    """Return the schemas of slot tools, as the `tools` of a chat completion.

    A schema has what every server of chat completions can handle. These rules are only in its descriptions, and the service enforces them: which
    arguments an `action` needs, the sizes of texts, the names of environment variables, and that `old` and `new` differ. The service also accepts null
    for an optional argument, as if it were not given.

    Args:
        tools: the names of the tools; the schemas are in this order.

    Raises:
        ValueError: a name is not that of a slot tool.
    """
    _check_names(tools)
    return [copy.deepcopy(dict(_FUNCTIONS[tool])) for tool in tools]


def _check_names(tools: Collection[str]) -> None:
    """Check that every tool is one of a slot.

    Raises:
        ValueError: one of them is not.
    """
    unknown = [tool for tool in tools if tool not in _FUNCTIONS]
    if unknown:
        raise ValueError(f"there is no slot tool {', '.join(map(repr, unknown))}; there are {', '.join(_FUNCTIONS)}")


class CallExecutor(Protocol):
    """What runs the calls of `SlotTools`, such as a `CallGatherer`."""

    async def execute(self, call: Call, *, tool_from_program: bool = False) -> ExecutionResult:
        """Run one call; see `CallGatherer.execute`."""


class SlotTools:
    """The tools of one slot, for the model of a trajectory and for the hooks of its environment.

    Args:
        lease: the lease of the slot.
        executor: runs the calls.
        timeout_s: the timeout of a model's call, in seconds. The model can only ask for a shorter one.
        tools: the tools that the model may call.
        output_limit_bytes: how much output of a model's call comes back, in bytes; default the service's.
    """

    def __init__(
        self, lease: BaseLease, executor: CallExecutor, *, timeout_s: float, tools: Collection[str] = BASE_TOOLS, output_limit_bytes: int | None = None
    ) -> None:
        self._lease = lease
        self._executor = executor
        self._timeout_s = timeout_s
        _check_names(tools)
        self._tools = tuple(tools)
        self._output_limit_bytes = output_limit_bytes

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The schemas of the tools that the model may call, made anew at each access. Who rolls out many trajectories calls `tool_schemas` once instead."""
        return tool_schemas(self._tools)

    async def run_model_call(self, tool: str, args: Any) -> ExecutionResult:
        """Run a tool call that a model has written.

        Arguments about which the environment decides are dropped, and named in `metadata["dropped_args"]`.

        Args:
            tool: the tool; one that the model may not call gives a result with the fault `policy`.
            args: the arguments, of any type. Wrong ones give a result with the fault `policy`.

        Raises:
            As `CallGatherer.execute`; nothing that the model writes raises an error.
        """
        if tool not in self._tools:
            return _unknown_tool_result(tool, self._tools)
        kept, dropped = split_model_args(args)
        timeout_s = shortest_timeout_s(self._timeout_s, dropped)
        call = self._lease.call(tool, kept, timeout_s=timeout_s, output_limit_bytes=self._output_limit_bytes)
        result = await self._executor.execute(call)
        if dropped:
            result = ExecutionResult(result.success, result.output, result.error, {**result.metadata, "dropped_args": sorted(dropped)})
        return result

    async def call_tool(self, tool: str, args: Any) -> str:
        """Run a tool call that a model has written, and return the JSON that the model gets. See `run_model_call` and `render_tool_reply`."""
        return render_tool_reply(tool, await self.run_model_call(tool, args))

    async def exec_tool(self, tool: str, args: Mapping[str, Any], timeout: float | None = 300) -> ExecutionResult:
        """Run a tool call of the environment itself, such as a hook's. It may use every tool, and its arguments are passed on as they are.

        Args:
            tool: the tool.
            args: its arguments.
            timeout: the timeout, in seconds; at most the `max_timeout_s` of the pool. None: the default of the pool.

        Raises:
            InvalidRequest: there is no such tool, or the timeout is not valid.
            As `CallGatherer.execute` otherwise.
        """
        return await self._executor.execute(self._lease.call(tool, args, timeout_s=timeout), tool_from_program=True)


def split_model_args(args: Any) -> tuple[Any, dict[str, Any]]:
    """Divide the arguments that a model has written into those of the tool, and those about which the environment decides."""
    if not isinstance(args, Mapping):
        return args, {}
    dropped = {name: value for name, value in args.items() if name in TIMEOUT_ARGUMENTS or name in ENVIRONMENT_ARGUMENTS}
    return ({name: value for name, value in args.items() if name not in dropped} if dropped else args), dropped


def shortest_timeout_s(timeout_s: float, dropped: Mapping[str, Any]) -> float:
    """Return the timeout of a model's call: the environment's, or a shorter one that the model has asked for.

    Args:
        timeout_s: the timeout of the environment, in seconds.
        dropped: what the model has written; a timeout that is not a positive number counts as none.
    """
    asked = [dropped[name] for name in TIMEOUT_ARGUMENTS if name in dropped]
    return min([timeout_s, *(value for value in asked if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf)])


def render_tool_reply(tool: str, result: ExecutionResult) -> str:
    """Return the result of a call as the JSON object that the model gets.

    It has `output`; the `exit_code` of a command, null if the command did not end by itself; `error` if the call failed; `truncated` if the middle of
    the output is missing; `session_reason` if a stateful shell was lost; and for `process` the `process_id`, its `state` and the `next_offset` of a log.
    """
    reply: dict[str, Any] = {"output": result.output}
    if tool in _COMMAND_TOOLS and "exit_code" in result.metadata:
        reply["exit_code"] = result.metadata["exit_code"]
    if result.error:
        reply["error"] = result.error
    if result.metadata.get("truncated"):
        reply["truncated"] = True
    reply.update({name: result.metadata[name] for name in _REPLY_METADATA.get(tool, ()) if name in result.metadata})
    return json.dumps(reply, ensure_ascii=False)


def _unknown_tool_result(tool: str, tools: Sequence[str]) -> ExecutionResult:
    error = f"there is no tool {str(tool)[:100]!a}; you may call {', '.join(tools)}"
    metadata = {"reason": Reason.INVALID_ARGS.value, "fault": Fault.POLICY.value, "exit_code": None, "evidence": {"ran": False, "field": "tool"}}
    return ExecutionResult(False, "", error, metadata)

"""What a tool is: its name, the check of its arguments, its capabilities, and what happens during one call of it."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping, Protocol, Sequence

from sandbox_server.agent.execution.call_spec import CallSpec
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.lease_context import LeaseContext
from sandbox_server.agent.execution.output import Sink
from sandbox_server.agent.execution.processes.slot_process import Writable
from sandbox_server.agent.execution.processes.spawn_spec import SpawnSpec
from sandbox_server.agent.execution.slot_runtime import SlotRuntime


class HandledCall(Protocol):
    """What a handler can use of the call that it handles."""

    spec: CallSpec
    lease: LeaseContext
    runtime: SlotRuntime
    sinks: Sequence[Sink]

    def start_process(self, spec: SpawnSpec, outputs: Sequence[Writable]) -> None:
        """Start the process of the call. Its output goes to `outputs`.

        Raises:
            OSError: the agent has no descriptors left for it.
        """

    def add_done_callback(self, callback: Callable[[CallOutcome], None]) -> None:
        """Call `callback` with the outcome once the call has ended, for whatever reason."""

    def run_in_session(self, name: str, command: bytes) -> None:
        """Run a command in the shell of a session, as soon as the earlier calls of the session have ended.

        Raises:
            ToolError: the lease has as many sessions as it may have.
        """

    def finish_call(self, reason: str, exit_code: int | None = None, error: str = "", metadata: dict[str, Any] | None = None, tool_ok: bool = False) -> None:
        """End the call with this outcome."""

    def finish_by_status(self, status: int) -> None:
        """End the call with the outcome that the end of its process proves; `status` is as `os.wait4` returns it."""

    def judge_exit(self, status: int, exit_code: int) -> tuple[str, str, dict[str, Any]]:
        """Say why the process of the call ended. Returns reason, error sentence and metadata."""


class ToolHandler(Protocol):
    """One call of a tool, whose arguments are valid."""

    def start_call(self, call: HandledCall) -> None:
        """Start the call's process, or do what the call asks for and end the call.

        Raises:
            OSError: the agent has no descriptors left for the call.
        """

    def on_process_ended(self, call: HandledCall, status: int) -> None:
        """End the call, whose process has ended; `status` is as `os.wait4` returns it. All output has been read."""


@dataclasses.dataclass(frozen=True)
class ToolCapabilities:
    """What calls of a tool can do.

    Args:
        has_process: whether a call takes time, as it has a process of its own or waits for one, so that its timeouts apply. Other calls end at once.
    """

    has_process: bool = True


@dataclasses.dataclass(frozen=True)
class Tool:
    """One tool.

    Args:
        name: as calls name it.
        parse_arguments: checks the arguments of a call and returns the call's handler. It raises InvalidArgs, naming the argument that is not valid.
        capabilities: what calls of it can do.
    """

    name: str
    parse_arguments: Callable[[Mapping[str, Any]], ToolHandler]
    capabilities: ToolCapabilities = ToolCapabilities()

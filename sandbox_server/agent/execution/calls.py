"""One tool call, from its description to its outcome."""

from __future__ import annotations

import asyncio
import errno
import os
import time
from typing import Any, Callable, Sequence

from sandbox_server.agent.errors import InvalidArgs, Refused, UnknownTool
from sandbox_server.agent.execution import evidence
from sandbox_server.agent.execution.call_spec import CallSpec
from sandbox_server.agent.execution.deadlines import CallDeadlines
from sandbox_server.agent.execution.journal import CallOutcome, call_identity
from sandbox_server.agent.execution.lease_context import LeaseContext
from sandbox_server.agent.execution.output import Sink
from sandbox_server.agent.execution.processes.slot_process import SlotProcess, Writable
from sandbox_server.agent.execution.processes.spawn_spec import SpawnSpec
from sandbox_server.agent.execution.sessions.session_turn import SessionTurn
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.execution.tools.tool import ToolHandler
from sandbox_server.agent.execution.tools.tool_registry import find_tool
from sandbox_server.agent.kernel.leaf_groups import Leaf
from sandbox_server.agent.kernel.processor_watch import ProcessorWatch

_REPORT_WITHIN_S = 0.1


class AgentCall:
    """A running call. All methods run in the event loop; only the end of the process tree takes a task of its own.

    Args:
        lease: the lease that the call belongs to.
        runtime: the slot runtime in which it runs.
        spec: its description.
    """

    __slots__ = (
        "_cpu_s",
        "_deadlines",
        "_ending_reason",
        "_handler",
        "_limits_before",
        "_loop",
        "_max_rss_bytes",
        "_on_done",
        "_process",
        "_processor_watch",
        "_started",
        "_turn",
        "has_concurrent_work",
        "lease",
        "outcome",
        "output_watchers",
        "runtime",
        "sinks",
        "spec",
        "started_at",
    )  # fmt: skip

    def __init__(self, lease: LeaseContext, runtime: SlotRuntime, spec: CallSpec) -> None:
        self.lease = lease
        self.runtime = runtime
        self.spec = spec
        self._loop = asyncio.get_event_loop()
        self.started_at = time.time()
        self._started = self._loop.time()
        self._on_done: list[Callable[[CallOutcome], None]] = []
        self.output_watchers: list[Callable[[], None]] = []  # called when there is more output, and when the call has ended
        self.sinks: Sequence[Sink] = [Sink(lease.spool, spec.output_limit_bytes) for _ in range(2 if spec.separate_streams else 1)]
        self.outcome: CallOutcome | None = None
        self.has_concurrent_work = False  # another call or a job of the slot had processes at the same time
        self._handler: ToolHandler | None = None
        self._process: SlotProcess | SessionTurn | None = None
        self._turn: SessionTurn | None = None  # the same, if the call runs in a session
        self._deadlines: CallDeadlines | None = None
        self._processor_watch: ProcessorWatch | None = None
        self._ending_reason: str | None = None  # why the agent ends the process tree
        self._limits_before: dict[str, int] = {}
        self._cpu_s = 0.0
        self._max_rss_bytes = 0

    def add_done_callback(self, callback: Callable[[CallOutcome], None]) -> None:
        """Call `callback` with the outcome once the call has ended."""
        self._on_done.append(callback)

    @property
    def output_bytes(self) -> int:
        """How much the call has written so far."""
        return sum(sink.total_bytes for sink in self.sinks)

    def start_call(self) -> None:
        """Check the arguments, and start the call. A call that cannot be started ends at once."""
        try:
            tool = find_tool(self.spec.tool)
            self._handler = tool.parse_arguments(self.spec.args)
            if tool.capabilities.has_process:
                self._deadlines = CallDeadlines(self.spec, self._started, self._read_reports, self._end_tree_because)
            self._handler.start_call(self)
            if self._deadlines is not None and not isinstance(self._process, SlotProcess):
                self._deadlines.start_timers()  # at once: the call may have to wait, for its session or its terminal
        except InvalidArgs as error:
            field = "tool" if isinstance(error, UnknownTool) else "args"
            self.finish_call("invalid_args", error=str(error), metadata={"evidence": {"ran": False, "field": field}})
        except OSError as error:
            facts = {"errno": errno.errorcode.get(error.errno or 0, str(error.errno)), "at": "agent"}
            self.finish_call("backend_error", error="the agent could not set the call up: %s" % error, metadata={"may_have_run": False, "evidence": facts})

    # What the tool's handler uses.

    def start_process(self, spec: SpawnSpec, outputs: Sequence[Writable]) -> None:
        """See `ToolCall`."""
        resources = self.lease.resources
        self._limits_before, self.has_concurrent_work = evidence.read_limit_counters(self.runtime, self.lease.add_live_call(self))
        process = self._process = SlotProcess(self.runtime, resources.drains, outputs, self)
        process.start_process(spec, self._make_processor_watch)

    def run_in_session(self, name: str, command: bytes) -> None:
        """See `ToolCall`."""
        session, turn = self.lease.sessions.add_call(name, self.runtime, command, self.sinks, self)
        self._process = self._turn = turn
        session.add_turn(turn)

    def finish_by_status(self, status: int) -> None:
        """See `ToolCall`."""
        exit_code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        reason, error, metadata = self.judge_exit(status, exit_code)
        self.finish_call(reason, exit_code=exit_code, error=error, metadata=metadata)

    def judge_exit(self, status: int, exit_code: int) -> tuple[str, str, dict[str, Any]]:
        """See `ToolCall`."""
        limits = self.lease.resources.limits
        return evidence.judge_exit(self.runtime, self._limits_before, self.has_concurrent_work, status, exit_code, self._max_rss_bytes, limits)

    # The reports of the process, or of the session.

    def on_turn_began(self, own_processes: int) -> None:
        """See `SessionCall`."""
        has_concurrent_work = self.lease.add_live_call(self, own_processes)
        self._limits_before, self.has_concurrent_work = evidence.read_limit_counters(self.runtime, has_concurrent_work, own_processes)

    def watch_process(self, process: SlotProcess) -> None:
        """See `SessionCall`. Its processor time is measured from now on."""
        if process.leaf is not None:
            self._make_processor_watch(process.leaf)
        if self._processor_watch is not None:
            self._processor_watch.start_watch()

    def _make_processor_watch(self, leaf: Leaf) -> None:
        """Remember what the control group has used so far: before the process is started, because the agent may have to wait for a processor after that."""
        self._processor_watch = ProcessorWatch(leaf, self.lease.resources.processor_share(), self.runtime.init_pid, self.spec.timeout_s)

    def on_shell_failed(self, detail: str) -> None:
        """See `SessionCall`."""
        if self.outcome is None and self._ending_reason is None:
            self.finish_call("backend_error", error=detail, metadata={"may_have_run": False, "evidence": {"at": "session"}})

    def on_still_running(self) -> None:
        """See `ProcessListener`."""
        if self._deadlines is not None:
            self._deadlines.start_timers()
        if self._processor_watch is not None:
            self._processor_watch.start_watch()

    def on_output(self) -> None:
        """See `ProcessListener`."""
        if self._deadlines is not None:
            self._deadlines.record_output()
        for watcher in self.output_watchers:
            watcher()

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `ProcessListener`."""
        self._cpu_s, self._max_rss_bytes = cpu_s, max_rss_bytes
        if self._ending_reason is not None or self.outcome is not None:
            return  # the agent is ending the tree, or has given the call up: that determines the outcome
        if self._process is not None:
            self._process.collect_output()
        if self._handler is not None:
            self._handler.on_process_ended(self, status)

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `ProcessListener`."""
        if self.outcome is not None:
            return
        if self._process is not None:
            self._process.collect_output()
        self._ending_reason = None
        limits = self.lease.resources.limits
        reason, error, metadata = evidence.judge_refusal(errno, step, self.spec.args, self.runtime, self._limits_before, limits)
        self.finish_call(reason, error=error, metadata=metadata)

    def on_init_lost(self, detail: str) -> None:
        """See `ProcessListener`."""
        if self.outcome is None and self._ending_reason is None:  # if the agent is ending the tree, that determines the outcome
            reason, error, metadata = evidence.judge_lost_init(self.runtime, self._limits_before, detail)
            self.finish_call(reason, error=error, metadata=metadata)

    # Ends that the process does not bring about.

    def _read_reports(self) -> None:
        """Process what init and the pipes hold now, before a deadline counts as passed: if the agent did not run for a while, everything waits there."""
        if self._process is not None:
            self.runtime.link.poll_reports()
            self._process.poll_output()

    def cancel_call(self) -> None:
        """End the process tree, and then the call as `cancelled`."""
        self._end_tree_because("cancelled")

    def _end_tree_because(self, reason: str) -> None:
        if self._ending_reason is None and self.outcome is None:
            self._ending_reason = reason
            self.lease.resources.tasks.start_task(self._end_tree(reason))

    async def _end_tree(self, reason: str) -> None:
        facts = self._read_end_evidence(reason)
        if self._process is not None:
            try:
                facts.update(await self._process.end_tree())
            except (OSError, asyncio.TimeoutError) as error:
                facts["tree"] = "could not be ended: %s" % (str(error) or "init did not answer")
            await self._process.wait_until_over(_REPORT_WITHIN_S)
            # The report on the first process leaves out those descendants that it had not waited for when they were killed.
            self._cpu_s = max(self._cpu_s, self._process.killed_cpu_s)
        if self.outcome is None:
            never_ran = {"may_have_run": False} if facts.get("ran") is False else {}
            self.finish_call(reason, error=self._error_sentence(reason), metadata={**never_ran, "evidence": facts})

    def _error_sentence(self, reason: str) -> str:
        if reason == "cancelled":
            return "the call was cancelled"
        ended = self._turn.describe_end() if self._turn is not None else "and was killed with its whole tree"
        if reason == "timeout":
            return "the call passed its timeout of %g s %s" % (self.spec.timeout_s, ended)
        return "the call wrote nothing for %g s %s" % (self.spec.no_output_timeout_s or 0, ended)

    def _read_end_evidence(self, reason: str) -> dict[str, Any]:
        facts: dict[str, Any] = {"after_s": round(self._loop.time() - self._started, 3)}
        starvation = self._processor_watch.starvation_evidence() if self._processor_watch is not None else None
        if reason != "cancelled":
            # A call that got too little processor time may have timed out for that reason alone.
            facts.update(load_1m=round(os.getloadavg()[0], 1), processors=len(os.sched_getaffinity(0)))
            if starvation is not None:
                facts["starved"] = starvation
        if self._deadlines is not None and self._deadlines.stalled_s:
            facts["agent_stood_still_s"] = round(self._deadlines.stalled_s, 3)
        return facts

    def finish_without_waiting(self, lost: str | None = None) -> None:
        """End the call now; the caller ends its processes.

        Args:
            lost: why the sandbox is lost; the call ends as `sandbox_lost`. None: the slot is reset or its rights change; the call ends as `cancelled`,
                or as what the agent was already ending it for.
        """
        if self.outcome is not None:
            return
        if lost is not None:
            self.finish_call("sandbox_lost", error="the sandbox has ended: %s" % lost, metadata={"evidence": {"agent": lost}})
        else:
            reason = self._ending_reason or "cancelled"  # a deadline that has passed determines the outcome, although its tree was not ended yet
            facts = self._read_end_evidence(reason) if self._ending_reason is not None else {}
            facts["slot"] = "given back, or its rights changed"
            self.finish_call(reason, error=self._error_sentence(reason), metadata={"evidence": facts})

    def finish_call(self, reason: str, exit_code: int | None = None, error: str = "", metadata: dict[str, Any] | None = None, tool_ok: bool = False) -> None:
        """See `ToolCall`."""
        if self._deadlines is not None:
            self._deadlines.cancel_timers()
        if self._process is not None:
            self._process.collect_output()
        if self._processor_watch is not None:
            # The report on the first process leaves out those descendants that it has not waited for.
            self._cpu_s = max(self._cpu_s, self._processor_watch.used_s())
            self._processor_watch.stop_watch()
        if self._turn is not None:
            metadata = {**(metadata or {}), **self._turn.metadata()}
        outcome = self.outcome = CallOutcome(
            call_id=self.spec.call_id,
            reason=reason,
            exit_code=exit_code,
            error=error,
            started_at=self.started_at,
            duration_s=self._loop.time() - self._started,
            cpu_s=self._cpu_s,
            max_rss_bytes=self._max_rss_bytes,
            tool_ok=tool_ok,
            metadata=metadata if metadata is not None else {},
            outputs=[sink.finish_output() for sink in self.sinks],
            encoding=self.spec.encoding,
        )
        if self._turn is not None:
            self._turn.leave_session()
        self.lease.remove_live_call(self)
        self.lease.journal.record_outcome(self.spec.call_id, outcome)
        callbacks, self._on_done = self._on_done, []
        for callback in callbacks:
            callback(outcome)
        for watcher in self.output_watchers:
            watcher()


def submit_call(lease: LeaseContext, runtime: SlotRuntime, spec: CallSpec, on_done: Callable[[CallOutcome], None]) -> None:
    """Start a call. If it was submitted before, wait for it, or repeat its outcome: no call runs twice.

    Args:
        lease: the lease that the call belongs to.
        runtime: the slot runtime in which it runs.
        spec: its description.
        on_done: called with the outcome.
    """
    identity = call_identity(spec.tool, spec.args)
    entry = lease.journal.get_entry(spec.call_id)
    if entry is not None:
        if entry.identity != identity:
            on_done(_refused_outcome(spec, "call_conflict", "the call id %s was used with other arguments" % spec.call_id, {}))
        elif entry.outcome is not None:
            on_done(entry.outcome)
        else:
            entry.call.add_done_callback(on_done)
        return
    if lease.journal.is_full:
        error = "the slot has had as many calls as one lease may have"
        on_done(_refused_outcome(spec, "backend_error", error, {"may_have_run": False, "limit": "calls"}))
        return
    call = AgentCall(lease, runtime, spec)
    lease.journal.record_start(spec.call_id, identity, call)
    call.add_done_callback(on_done)
    call.start_call()


def find_call(lease: LeaseContext, call_id: Any) -> AgentCall | CallOutcome:
    """Return a call that runs, or the outcome of one that has ended.

    Raises:
        Refused: call_not_found.
    """
    entry = lease.journal.get_entry(call_id) if isinstance(call_id, str) else None
    if entry is None:
        raise Refused("call_not_found", "there is no call %s" % ascii(call_id))
    if entry.outcome is not None:
        return entry.outcome
    call: AgentCall = entry.call
    return call


def _refused_outcome(spec: CallSpec, reason: str, error: str, metadata: dict[str, Any]) -> CallOutcome:
    metadata = {"evidence": {"ran": False}, **metadata}
    return CallOutcome(spec.call_id, reason, None, error, time.time(), 0.0, 0.0, 0, False, metadata, ())

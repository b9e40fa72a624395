"""One tool call, from its item to its verdict."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import time
from typing import TYPE_CHECKING, Any, Callable, Mapping

from sandbox_server.agent.errors import InvalidArgs, UnknownTool
from sandbox_server.agent.execution import evidence
from sandbox_server.agent.execution.framed import Framed
from sandbox_server.agent.execution.journal import CallOutcome
from sandbox_server.agent.execution.output import Kept, Sink
from sandbox_server.agent.execution.process_kill import end_tree
from sandbox_server.agent.execution.process_tree import ProcessTree
from sandbox_server.agent.execution.tools import tool_registry
from sandbox_server.agent.execution.tools.shell import Command
from sandbox_server.agent.kernel.processor_watch import ProcessorWatch

if TYPE_CHECKING:
    from sandbox_server.agent.slots.slots import Slot

MAX_OUTPUT_LIMIT_BYTES = 10 << 20
DEFAULT_OUTPUT_LIMIT_BYTES = 50_000
_REPORT_WITHIN_S = 0.1
_STOOD_STILL_S = 1.0  # a timer that is so late: this process did not run, and perhaps the slot did not either
_MOST_GIVEN_BACK_S = 10.0
MAX_TIMEOUT_S = 365 * 86400.0  # as much as the service takes: what it has let through is not the policy's mistake


@dataclasses.dataclass
class Spec:
    """What the service asks for, checked as far as the agent must be able to rely on it."""

    call_id: str
    tool: str
    args: Mapping[str, Any]
    timeout_s: float
    no_output_timeout_s: float | None
    output_limit_bytes: int
    separate_streams: bool
    encoding: str = "utf-8"  # of no use here: whoever asks after the call is told in which one its caller wants it


def parse_spec(meta: Mapping[str, Any]) -> Spec:
    """Read a call item.

    Raises:
        InvalidArgs: naming the field that does not fit.
    """
    call_id, tool, args = meta.get("call_id"), meta.get("tool"), meta.get("args", {})
    if not isinstance(call_id, str) or not 0 < len(call_id) <= 128:
        raise InvalidArgs("call_id must be a string of 1 to 128 characters")
    if not isinstance(tool, str):
        raise InvalidArgs("tool must be a string")
    if not isinstance(args, dict):
        raise InvalidArgs("args must be an object")
    limit = meta.get("output_limit_bytes", DEFAULT_OUTPUT_LIMIT_BYTES)
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_OUTPUT_LIMIT_BYTES:
        raise InvalidArgs("output_limit_bytes must be an integer from 0 to %d" % MAX_OUTPUT_LIMIT_BYTES)
    timeout_s = _seconds("timeout_s", meta.get("timeout_s"))
    if timeout_s is None:
        raise InvalidArgs("timeout_s is missing")
    return Spec(
        call_id, tool, args, timeout_s, _seconds("no_output_timeout_s", meta.get("no_output_timeout_s")), limit, bool(meta.get("separate_streams", False)),
        "base64" if meta.get("encoding") == "base64" else "utf-8",
    )  # fmt: skip


def _seconds(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= MAX_TIMEOUT_S:
        raise InvalidArgs("%s must be a number of seconds above 0, at most %d" % (name, MAX_TIMEOUT_S))
    return float(value)


class Call:
    """A running call. Everything happens in callbacks of the event loop; only the killing of its tree is a task.

    Args:
        slot: where it runs.
        spec: what is asked for.
    """

    __slots__ = (
        "_cpu_s",
        "_deadline",
        "_done",
        "_ending",
        "_framed",
        "_last_output",
        "_limits_before",
        "_max_rss_bytes",
        "_processor",
        "_silence",
        "_slot",
        "_started",
        "_stood_still_s",
        "concurrent_calls",
        "loop",
        "outcome",
        "run",
        "sinks",
        "spec",
        "started_at",
        "watchers",
    )  # fmt: skip

    def __init__(self, slot: Slot, spec: Spec) -> None:
        self._slot = slot
        self.spec = spec
        self.loop = slot.loop
        self.started_at = time.time()
        self._started = self.loop.time()
        self._last_output = self._started
        self._done: list[Callable[[CallOutcome], None]] = []
        self.watchers: list[Callable[[], None]] = []
        self.sinks: list[Sink] = []
        self.run: ProcessTree | None = None
        self.outcome: CallOutcome | None = None
        self._framed: Framed | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._silence: asyncio.TimerHandle | None = None
        self._ending: str | None = None
        self._stood_still_s = 0.0
        self._cpu_s = 0.0
        self._max_rss_bytes = 0
        self._processor: ProcessorWatch | None = None
        self._limits_before: dict[str, int] = {}
        self.concurrent_calls = False  # something else of the slot ran beside it

    def on_done(self, callback: Callable[[CallOutcome], None]) -> None:
        """Hear the verdict."""
        self._done.append(callback)

    @property
    def output_bytes(self) -> int:
        """What it has written so far."""
        return sum(sink.total for sink in self.sinks)

    def start(self) -> None:
        """Check the arguments and set it going."""
        spec, slot = self.spec, self._slot
        count = 2 if spec.separate_streams else 1
        self.sinks = [Sink(slot.spool, spec.output_limit_bytes) for _ in range(count)]
        try:
            plan = tool_registry.plan(spec.tool, spec.args)
        except InvalidArgs as error:
            field = "tool" if isinstance(error, UnknownTool) else "args"
            self._finish("invalid_args", error=str(error), metadata={"evidence": {"ran": False, "field": field}})
            return
        except tool_registry.NotBuilt as error:
            self._finish("not_implemented", error=str(error), metadata={"evidence": {"ran": False}})
            return
        if isinstance(plan, tool_registry.JobAction):
            self._job(plan)
            return
        self._deadline = self.loop.call_at(self._started + spec.timeout_s, self._timed_out, self._started + spec.timeout_s)
        if spec.no_output_timeout_s is not None:
            self._silence = self.loop.call_later(spec.no_output_timeout_s, self._look_for_silence)
        try:
            self._spawn(plan)
        except OSError as error:
            self._not_set_up(error)

    def _not_set_up(self, error: OSError) -> None:
        proof = {"errno": errno.errorcode.get(error.errno or 0, str(error.errno)), "at": "agent"}
        self._finish("backend_error", error="the agent could not set the call up: %s" % error, metadata={"may_have_run": False, "evidence": proof})

    def _spawn(self, plan: Command | tool_registry.FileTool) -> None:
        body = self._slot.current_body()
        self._limits_before, self.concurrent_calls = evidence.limits_of(body, self._slot.joined_by(self))
        if isinstance(plan, Command):
            run = self.run = ProcessTree(body, self._slot.drains, self.sinks, self)
            run.start(spawn_request(body.shell, body.workspace, plan), plan.stdin, plan.script)
        else:
            self._framed = Framed(self.sinks[0])
            run = self.run = ProcessTree(body, self._slot.drains, [self._framed], self)
            run.start({"op": "fork", "tool": plan.tool, "args": dict(plan.args), "env": None}, None)
        if run.leaf is not None:
            self._processor = ProcessorWatch(run.leaf, self._slot.processor_share, body.init_pid, self.spec.timeout_s)

    def _job(self, action: tool_registry.JobAction) -> None:
        try:
            text, metadata = self._slot.jobs.act(action)
        except InvalidArgs as error:
            self._finish("invalid_args", error=str(error), metadata={"evidence": {"ran": False}})
        except tool_registry.ToolError as error:
            self._finish("tool_error", error=str(error), metadata={"evidence": {"tool": "process %s" % action.action}})
        except OSError as error:
            self._not_set_up(error)
        else:
            self.sinks[0].write(text)
            self._finish("exit", exit_code=0, tool_ok=True, metadata=metadata)

    # What the run says.

    def wrote(self) -> None:
        """See `runs.Owner`."""
        self._last_output = self.loop.time()
        for watcher in self.watchers:
            watcher()

    def ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `runs.Owner`."""
        self._cpu_s, self._max_rss_bytes = cpu_s, max_rss_bytes
        if self._ending is not None or self.outcome is not None:
            return  # its tree is being ended; that decides
        if self.run is not None:
            self.run.collect()
        if self._framed is not None:
            self._tool_ended(status)
            return
        if os.WIFSIGNALED(status):
            code = 128 + os.WTERMSIG(status)
        else:
            code = os.WEXITSTATUS(status)
        reason, sentence, proof = self._of_exit(status, code)
        self._finish(reason, exit_code=code, error=sentence, metadata=proof)

    def _of_exit(self, status: int, code: int) -> tuple[str, str, dict[str, Any]]:
        return evidence.of_exit(self._slot.body, self._limits_before, self.concurrent_calls, status, code, self._max_rss_bytes, self._slot.limits)

    def _tool_ended(self, status: int) -> None:
        framed = self._framed
        header = framed.header if framed is not None else None
        if header is None or (header.get("ok") and status != 0):
            code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else 1
            reason, sentence, proof = self._of_exit(status, code)
            if reason == "exit":
                reason, sentence = "tool_error", "%s broke off before it had finished" % self.spec.tool
            self._finish(reason, error=sentence, metadata=proof)
        elif header.get("ok"):
            self._finish("exit", exit_code=0, tool_ok=True, metadata={key: value for key, value in header.items() if key != "ok"})
        else:
            reason = "invalid_args" if header.get("code") == "invalid_args" else "tool_error"
            said = {"errno": header["errno"]} if "errno" in header else {}
            self._finish(reason, error=str(header.get("detail", "")), metadata={**said, "evidence": said or {"tool": self.spec.tool}})

    def refused(self, number: int, where: str) -> None:
        """See `runs.Owner`."""
        if self.outcome is not None:
            return
        if self.run is not None:
            self.run.collect()
        self._ending = None
        reason, sentence, metadata = evidence.of_refusal(number, where, self.spec.args, self._slot.body, self._limits_before, self._slot.limits)
        self._finish(reason, error=sentence, metadata=metadata)

    def init_lost(self, detail: str) -> None:
        """See `runs.Owner`."""
        if self.outcome is None and self._ending is None:  # a tree that is being ended decides itself
            reason, sentence, metadata = evidence.of_lost_init(self._slot.body, self._limits_before, detail)
            self._finish(reason, error=sentence, metadata=metadata)

    # Ends from outside.

    def _timed_out(self, due: float) -> None:
        self._catch_up()
        late = self._given_back(due)
        if late and self.outcome is None:
            self._deadline = self.loop.call_later(late, self._end, "timeout")
        else:
            self._end("timeout")

    def _look_for_silence(self) -> None:
        limit = self.spec.no_output_timeout_s
        if limit is None:
            return
        if self.loop.time() - self._last_output >= limit:
            self._catch_up()
        silent = self.loop.time() - self._last_output
        if silent >= limit and not self._given_back(self._last_output + limit):
            self._end("no_output_timeout")
        elif self.outcome is None:
            self._silence = self.loop.call_later(max(limit - silent, self._stood_still_s), self._look_for_silence)

    def _catch_up(self) -> None:
        """See what has come before a deadline is held to have passed: one who stood still hears of everything at once, in any order."""
        if self.run is not None:
            self.run.body.link.poll()
            self.run.poll()

    def _given_back(self, due: float) -> float:
        """How long this process stood still while a deadline passed, as far as the call gets that time again, once; 0: it did not."""
        late = self.loop.time() - due
        if late < _STOOD_STILL_S or self._stood_still_s:
            return 0.0
        self._stood_still_s = min(late, _MOST_GIVEN_BACK_S)
        return self._stood_still_s

    def cancel(self) -> None:
        """End its tree; the verdict is `cancelled`, unless it already has another."""
        self._end("cancelled")

    def _end(self, reason: str) -> None:
        if self._ending is None and self.outcome is None:
            self._ending = reason
            self._slot.spawn_task(self._end_tree(reason))

    async def _end_tree(self, reason: str) -> None:
        proof: dict[str, Any] = {"after_s": round(self.loop.time() - self._started, 3)}
        starved = self._processor.starvation_evidence() if self._processor is not None else None
        if reason != "cancelled":
            # Where others leave no time to a call, its timeout says little of it.
            proof.update(load_1m=round(os.getloadavg()[0], 1), processors=len(os.sched_getaffinity(0)))
            if starved is not None:
                proof["starved"] = starved
        if self._stood_still_s:
            proof["agent_stood_still_s"] = round(self._stood_still_s, 3)
        if self.run is not None:
            try:
                proof.update(await end_tree(self.run))
            except (OSError, asyncio.TimeoutError) as error:
                proof["tree"] = "could not be ended: %s" % (str(error) or "init did not answer")
            await self.run.reported(_REPORT_WITHIN_S)
            # The first process knows nothing of those of its tree that it had not waited for when they were killed.
            self._cpu_s = max(self._cpu_s, self.run.killed_cpu_s)
        if self.outcome is None:
            self._finish(reason, error=_sentence(reason, self.spec), metadata={"evidence": proof})

    def abandon(self, lost: str | None = None) -> None:
        """The slot is being reset: the verdict is `cancelled`, now; the reset ends the processes. Or it is `lost` with all the sandbox, and why."""
        if self.outcome is not None:
            return
        if lost is not None:
            self._finish("sandbox_lost", error="the sandbox has ended: %s" % lost, metadata={"evidence": {"agent": lost}})
        else:
            self._finish("cancelled", error=_sentence("cancelled", self.spec), metadata={"evidence": {"slot": "given back, or its rights changed"}})

    def _finish(self, reason: str, exit_code: int | None = None, error: str = "", metadata: dict[str, Any] | None = None, tool_ok: bool = False) -> None:
        for timer in (self._deadline, self._silence):
            if timer is not None:
                timer.cancel()
        if self.run is not None:
            self.run.collect()
        if self._processor is not None:
            # The first process knows nothing of those of its tree that it has not waited for.
            self._cpu_s = max(self._cpu_s, self._processor.used_s())
            self._processor.close()
        outputs: list[Kept] = [sink.finish() for sink in self.sinks]
        outcome = self.outcome = CallOutcome(
            self.spec.call_id, reason, exit_code, error, self.started_at, self.loop.time() - self._started, self._cpu_s, self._max_rss_bytes, tool_ok,
            metadata if metadata is not None else {}, outputs, self.spec.encoding,
        )  # fmt: skip
        self._slot.live.discard(self)
        self._slot.journal.end(self.spec.call_id, outcome)
        done, self._done = self._done, []
        for callback in done:
            callback(outcome)
        for watcher in self.watchers:
            watcher()


def spawn_request(shell: str, workspace: str, plan: Command) -> dict[str, Any]:
    """What init is told to start."""
    cwd = workspace if plan.cwd is None else os.path.join(workspace, plan.cwd)
    return {"op": "spawn", "argv": [shell, *plan.args], "env": dict(plan.env) if plan.env else None, "cwd": cwd}


def _sentence(reason: str, spec: Spec) -> str:
    if reason == "timeout":
        return "the call passed its timeout of %g s and was killed with its whole tree" % spec.timeout_s
    if reason == "no_output_timeout":
        return "the call wrote nothing for %g s and was killed with its whole tree" % (spec.no_output_timeout_s or 0)
    return "the call was cancelled"

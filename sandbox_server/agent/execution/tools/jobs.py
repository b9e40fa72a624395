"""The tool `process`: jobs that are started now and looked at later. They live until they are killed or the slot is reset."""

from __future__ import annotations

import itertools
import os
from collections import deque
from typing import TYPE_CHECKING, Any, Deque, Mapping

from sandbox_server.agent.errors import InvalidArgs
from sandbox_server.agent.execution.output import Kept, Sink
from sandbox_server.agent.execution.process_kill import end_tree
from sandbox_server.agent.execution.process_tree import ProcessTree
from sandbox_server.agent.execution.tools import shell
from sandbox_server.agent.execution.tools.tool_registry import JobAction, ToolError

if TYPE_CHECKING:
    from sandbox_server.agent.slots.slots import Slot

MAX_LIVE_JOBS = 64
MAX_JOBS = 1000
MAX_DATA_BYTES = 1 << 20
LOG_BYTES = 50_000
_UNWRITTEN_BYTES = 4 << 20
_ACTIONS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "start": (("action", "command"), ()),
    "list": (("action",), ()),
    "poll": (("action", "process_id"), ()),
    "log": (("action", "process_id"), ("offset",)),
    "write": (("action", "process_id", "data"), ()),
    "kill": (("action", "process_id"), ()),
}


def parse(args: Mapping[str, Any]) -> JobAction:
    """The arguments of `process`, checked.

    Raises:
        InvalidArgs: naming the argument that does not fit.
    """
    action = args.get("action")
    if not isinstance(action, str) or action not in _ACTIONS:
        raise InvalidArgs("action must be one of %s" % ", ".join(_ACTIONS))
    shell.check_names("process %s" % action, args, *_ACTIONS[action])
    process_id = args.get("process_id")
    if process_id is not None and not isinstance(process_id, str):
        raise InvalidArgs("process_id must be a string")
    offset = args.get("offset")
    if offset is not None and (isinstance(offset, bool) or not isinstance(offset, int) or offset < 0):
        raise InvalidArgs("offset must be an integer from 0 on")
    return JobAction(
        action=action,
        process_id=process_id,
        command=shell.command(args["command"], {}) if action == "start" else None,
        offset=offset or 0,
        data=shell.encode("data", args["data"], MAX_DATA_BYTES) if action == "write" else b"",
    )


class Job:
    """One background process with its output and its input."""

    def __init__(self, slot: Slot, job_id: str, text: str) -> None:
        self._slot = slot
        self.job_id = job_id
        self.text = text
        self.state = "running"
        self.exit_code: int | None = None
        self.error = ""
        self._sink = Sink(slot.spool, LOG_BYTES)
        self._kept: Kept | None = None
        self._run: ProcessTree | None = None
        self._stdin_fd = -1
        self._unwritten: Deque[bytes] = deque()
        self._unwritten_bytes = 0
        self._killing = False

    def start(self, request: dict[str, Any], script: bytes | None) -> None:
        """Set it going."""
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write_fd, False)
        self._stdin_fd = write_fd
        self._run = ProcessTree(self._slot.current_body(), self._slot.drains, [self._sink], self)
        try:
            self._run.start(request, None, script, stdin_fd=read_fd)
        finally:
            os.close(read_fd)

    def describe(self) -> dict[str, Any]:
        """What a caller may know of it."""
        kept = self._kept
        return {
            "process_id": self.job_id,
            "command": self.text[:200],
            "state": self.state,
            "exit_code": self.exit_code,
            "output_bytes": kept.total if kept is not None else self._sink.total,
            **({"error": self.error} if self.error else {}),
        }

    def log(self, offset: int) -> bytes:
        """Its output from an offset on, a bounded part at a time."""
        kept = self._kept
        return kept.read(offset, LOG_BYTES) if kept is not None else self._sink.read(offset, LOG_BYTES)

    def write(self, data: bytes) -> None:
        """Give it input.

        Raises:
            ToolError: it has ended, or does not read.
        """
        if self.state != "running":
            raise ToolError("the process %s has ended" % self.job_id)
        if self._unwritten_bytes + len(data) > _UNWRITTEN_BYTES:
            raise ToolError("the process %s does not read its input: %d bytes wait already" % (self.job_id, self._unwritten_bytes))
        if not self._unwritten and data:
            self._slot.loop.add_writer(self._stdin_fd, self._feed)
        if data:
            self._unwritten.append(data)
            self._unwritten_bytes += len(data)

    def _feed(self) -> None:
        while self._unwritten:
            data = self._unwritten[0]
            try:
                written = os.write(self._stdin_fd, data)
            except BlockingIOError:
                return
            except OSError:
                self._unwritten.clear()  # it has closed its input
                self._unwritten_bytes = 0
                break
            self._unwritten_bytes -= written
            if written < len(data):
                self._unwritten[0] = data[written:]
                return
            self._unwritten.popleft()
        self._slot.loop.remove_writer(self._stdin_fd)

    def kill(self) -> None:
        """End its whole tree, behind."""
        if self.state == "running" and not self._killing and self._run is not None:
            self._killing = True
            self._slot.spawn_task(self._kill(self._run))

    async def _kill(self, run: ProcessTree) -> None:
        await end_tree(run)

    def _over(self, state: str) -> None:
        if self.state != "running":
            return
        self.state = state
        if self._run is not None:
            self._run.collect()
        self._slot.loop.remove_writer(self._stdin_fd)
        os.close(self._stdin_fd)
        self._stdin_fd = -1
        self._kept = self._sink.finish()

    # What the run says.

    def wrote(self) -> None:
        """See `runs.Owner`: nobody waits for a job's output."""

    def ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `runs.Owner`."""
        self.exit_code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self._over("killed" if self._killing else "exited")

    def refused(self, number: int, where: str) -> None:
        """See `runs.Owner`."""
        self.error = "could not be started (%s): %s" % (where, os.strerror(number))
        self._over("failed")

    def init_lost(self, detail: str) -> None:
        """See `runs.Owner`."""
        self._over("lost")


class Jobs:
    """The jobs of one slot."""

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)

    @property
    def running(self) -> int:
        """How many have not ended."""
        return sum(job.state == "running" for job in self._jobs.values())

    def act(self, action: JobAction) -> tuple[bytes, dict[str, Any]]:
        """Do one action.

        Returns:
            The answer as text, and as fields.

        Raises:
            ToolError: it cannot be done.
        """
        if action.action == "start":
            return self._start(action)
        if action.action == "list":
            jobs = [job.describe() for job in self._jobs.values()]
            text = "".join("%(process_id)s  %(state)s  %(command)s\n" % job for job in jobs)
            return text.encode("utf-8", "surrogateescape"), {"processes": jobs}
        job = self._jobs.get(action.process_id or "")
        if job is None:
            raise ToolError("there is no process %s" % ascii(action.process_id))
        if action.action == "log":
            data = job.log(action.offset)
            return data, dict(job.describe(), offset=action.offset, next_offset=action.offset + len(data))
        if action.action == "write":
            job.write(action.data)
        elif action.action == "kill":
            job.kill()
        state = job.describe()
        return _text(state), state

    def _start(self, action: JobAction) -> tuple[bytes, dict[str, Any]]:
        from sandbox_server.agent.execution.calls import spawn_request

        if action.command is None:
            raise InvalidArgs("process start needs the argument command")
        live = self.running
        if live >= MAX_LIVE_JOBS or len(self._jobs) >= MAX_JOBS:
            raise ToolError("the slot has %d processes running and %d in all; at most %d and %d" % (live, len(self._jobs), MAX_LIVE_JOBS, MAX_JOBS))
        body = self._slot.current_body()
        script = action.command.script
        text = (script if script is not None else action.command.args[1]).decode("utf-8", "replace")
        self._slot.keep_company()
        job = Job(self._slot, "p%d" % next(self._numbers), text)
        job.start(spawn_request(body.shell, body.workspace, action.command), script)
        self._jobs[job.job_id] = job
        state = job.describe()
        return _text(state), state

    def close(self) -> None:
        """The slot's processes have ended."""
        for job in self._jobs.values():
            job.init_lost("the slot was reset")
        self._jobs.clear()


def _text(state: Mapping[str, Any]) -> bytes:
    code = "" if state["exit_code"] is None else " with exit code %d" % state["exit_code"]
    return ("process %s: %s%s\n" % (state["process_id"], state["state"], code)).encode()

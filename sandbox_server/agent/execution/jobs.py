"""Jobs: background processes of a slot. A job runs until it exits or is killed, or until the slot is reset or its rights change."""

from __future__ import annotations

import itertools
import os
from typing import Any

from sandbox_server.agent.errors import ToolError
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.output import FinishedOutput, Sink, Spool
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.processes.slot_process import SlotProcess
from sandbox_server.agent.execution.processes.spawn_spec import SpawnSpec
from sandbox_server.agent.execution.slot_runtime import SlotRuntime

MAX_RUNNING_JOBS = 64
MAX_JOBS = 1000
LOG_BYTES = 50_000
_MAX_UNWRITTEN_BYTES = 4 << 20
_MAX_SHOWN_CHARS = 200


class Job:
    """One background process, its output and its standard input.

    Args:
        job_id: names the job within its lease.
        command: the command, for a person to read.
        sink: keeps the output.
        tasks: runs the background task that kills the job.
    """

    def __init__(self, job_id: str, command: str, sink: Sink, tasks: BackgroundTasks) -> None:
        self.job_id = job_id
        self._command = command
        self._sink = sink
        self._tasks = tasks
        self.state = "running"
        self._exit_code: int | None = None
        self._error = ""
        self._finished_output: FinishedOutput | None = None
        self._process: SlotProcess | None = None
        self._is_being_killed = False

    def start_job(self, runtime: SlotRuntime, drains: Drains, spec: SpawnSpec) -> None:
        """Start the process.

        Raises:
            OSError: the agent has no descriptors left for its pipes.
        """
        process = SlotProcess(runtime, drains, [self._sink], self)
        process.start_process(spec)
        self._process = process

    def describe(self) -> dict[str, Any]:
        """The state of the job as the tool returns it."""
        finished = self._finished_output
        return {
            "process_id": self.job_id,
            "command": self._command[:_MAX_SHOWN_CHARS],
            "state": self.state,
            "exit_code": self._exit_code,
            "output_bytes": finished.total_bytes if finished is not None else self._sink.total_bytes,
            **({"error": self._error} if self._error else {}),
        }

    def read_log(self, offset_bytes: int) -> bytes:
        """Return at most `LOG_BYTES` of the output, from an offset on."""
        finished = self._finished_output
        return finished.read(offset_bytes, LOG_BYTES) if finished is not None else self._sink.read(offset_bytes, LOG_BYTES)

    def write_input(self, data: bytes) -> None:
        """Write to the standard input of the process, without waiting until the process reads it.

        Raises:
            ToolError: the process has ended, or too much of its input is unread already.
        """
        stdin = self._process.stdin if self._process is not None else None
        if self.state != "running" or stdin is None:
            raise ToolError("the process %s has ended" % self.job_id)
        if stdin.unwritten_bytes + len(data) > _MAX_UNWRITTEN_BYTES:
            raise ToolError("the process %s does not read its input: %d bytes wait already" % (self.job_id, stdin.unwritten_bytes))
        stdin.write_stdin(data)

    def kill_job(self) -> None:
        """Begin to end the process and its descendants, in the background."""
        if self.state == "running" and not self._is_being_killed and self._process is not None:
            self._is_being_killed = True
            self._tasks.start_task(_end_tree(self._process))

    def _finish(self, state: str) -> None:
        if self.state != "running":
            return
        self.state = state
        if self._process is not None:
            self._process.collect_output()
            if self._process.stdin is not None:
                self._process.stdin.close_stdin()
        self._finished_output = self._sink.finish_output()

    def on_still_running(self) -> None:
        """See `ProcessListener`. A job has no deadlines."""

    def on_output(self) -> None:
        """See `ProcessListener`. Nothing waits for the output of a job."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `ProcessListener`."""
        self._exit_code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        self._finish("killed" if self._is_being_killed else "exited")

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `ProcessListener`."""
        self._error = "could not be started (%s): %s" % (step, os.strerror(errno))
        self._finish("failed")

    def on_init_lost(self, detail: str) -> None:
        """See `ProcessListener`."""
        self._finish("lost")


async def _end_tree(process: SlotProcess) -> None:
    await process.end_tree()


class Jobs:
    """The jobs of one lease.

    Args:
        spool: keeps their outputs.
        drains: reads the pipes that outlive a job.
        tasks: runs background tasks.
    """

    def __init__(self, spool: Spool, drains: Drains, tasks: BackgroundTasks) -> None:
        self._spool = spool
        self._drains = drains
        self._tasks = tasks
        self._jobs: dict[str, Job] = {}
        self._numbers = itertools.count(1)

    def count_running(self) -> int:
        """How many jobs run."""
        return sum(job.state == "running" for job in self._jobs.values())

    def list_jobs(self) -> list[Job]:
        """All jobs, running or not."""
        return list(self._jobs.values())

    def find_job(self, job_id: str | None) -> Job:
        """Return the job with this id.

        Raises:
            ToolError: there is none.
        """
        job = self._jobs.get(job_id or "")
        if job is None:
            raise ToolError("there is no process %s" % ascii(job_id))
        return job

    def check_can_start(self) -> None:
        """Check that another job may be started.

        Raises:
            ToolError: the lease has as many jobs as it may have.
        """
        running = self.count_running()
        if running >= MAX_RUNNING_JOBS or len(self._jobs) >= MAX_JOBS:
            raise ToolError(
                "the slot has %d processes running and %d in all; at most %d and %d are allowed" % (running, len(self._jobs), MAX_RUNNING_JOBS, MAX_JOBS)
            )

    def start_job(self, runtime: SlotRuntime, command: str, spec: SpawnSpec) -> Job:
        """Start a job.

        Args:
            runtime: the slot runtime in which it runs.
            command: the command, for a person to read.
            spec: what to start.

        Raises:
            OSError: the agent has no descriptors left for its pipes.
        """
        job = Job("p%d" % next(self._numbers), command, Sink(self._spool, LOG_BYTES), self._tasks)
        job.start_job(runtime, self._drains, spec)
        self._jobs[job.job_id] = job
        return job

    def forget_jobs(self) -> None:
        """Forget all jobs. Their processes are ended with the slot runtime."""
        for job in self._jobs.values():
            job.on_init_lost("the slot was reset")
        self._jobs.clear()

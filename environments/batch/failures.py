"""The failures that end a run of the batch runner, each with one sentence on what happened and one on what to do, and the exit codes."""

from __future__ import annotations

#: All prompts have a trajectory. Broken lines that were skipped are no failure.
FINISHED = 0
#: The run went through the whole file, and some prompts have no trajectory.
SOME_FAILED = 1
#: The command line, the dataset or the run folder cannot be used. Nothing was run.
REFUSED = 2
#: The run was stopped before its end. What was written is complete, and `--resume` continues it.
STOPPED = 3


class BatchFailure(Exception):
    """The run cannot begin, or cannot go on.

    Args:
        sentence: what happened, to what.
        next_step: what to do about it.
    """

    exit_code = REFUSED

    def __init__(self, sentence: str, next_step: str) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.next_step = next_step


class RunRefused(BatchFailure):
    """The settings, the dataset or the run folder cannot be used."""


class RunStopped(BatchFailure):
    """The run has begun and cannot go on. It can be resumed."""

    exit_code = STOPPED


class WriteFailed(RunStopped):
    """A file of the run could not be written, for example because the disk is full."""

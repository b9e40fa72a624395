"""The standard input and output of a program inside a sandbox. A backend opens the pipe, and the link to the agent uses it."""

from __future__ import annotations

from typing import Protocol


class Pipe(Protocol):
    """The service's end of the agent's relay, a program that copies its standard input and output to and from the agent's unix socket.

    `read` and `write` may be awaited at the same time, each by one task.
    """

    async def read(self) -> bytes:
        """Wait for output of the program.

        Returns:
            Bytes that the program has written to its standard output: at least one, and at most some hundred kilobytes. Empty once the output has ended.

        Raises:
            OSError: the connection to the program is lost.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Write bytes to the program's standard input. Returns once the pipe can accept more, so that little data is buffered here.

        Raises:
            OSError: the program has closed its standard input, or the connection to it is lost.
        """
        ...

    async def wait_for_exit(self) -> str:
        """Wait until the program has ended. To be called after its output has ended.

        Returns:
            A clause with its exit code and the end of its standard error; empty if it ended without an error.
        """
        ...

    async def end_program(self) -> None:
        """Close the program's standard input, and make sure that the program ends within a few seconds. Does nothing if the pipe is closed."""
        ...

"""The standard input and output of a program inside a sandbox: a backend opens it, the link to an agent speaks through it."""

from __future__ import annotations

from typing import Protocol


class Pipe(Protocol):
    """The service's end of the agent's relay, a program that copies its standard input and output to and from the agent's unix socket.

    `read` and `write` may be awaited at the same time, each by one task.
    """

    async def read(self) -> bytes:
        """Wait for bytes that the program has written to its standard output.

        Returns:
            At least one byte, and at most what fits into memory without a thought (some hundred kilobytes); nothing once the output has ended.

        Raises:
            OSError: the program cannot be reached any more.
        """
        ...

    async def write(self, data: bytes) -> None:
        """Write bytes to the program's standard input. Returns once it takes more, so that what waits here stays small.

        Raises:
            OSError: the program has closed its standard input, or cannot be reached any more.
        """
        ...

    async def wait_for_exit(self) -> str:
        """Wait until the program has ended, after its output has.

        Returns:
            Its exit code and the last of what it wrote to its standard error, as part of a sentence; empty if it ended without an error.
        """
        ...

    async def close(self) -> None:
        """Close the program's standard input and see that the program ends, within a few seconds. A pipe that is closed already stays closed."""
        ...

"""A pipe to the relay of an agent, for backends that start the relay with a command, such as `docker exec -i`."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress

CHUNK_BYTES = 256 << 10
#: How long the program may take to end once its standard input is closed, before it is killed, in seconds.
END_S = 0.5
#: How much of the end of the program's standard error is kept for error messages.
STDERR_BYTES = 2000


async def open_process_pipe(argv: Sequence[str], env: Mapping[str, str]) -> ProcessPipe:
    """Start a program, and return a pipe to its standard input and output.

    Args:
        argv: the path of the program and its arguments.
        env: its environment.

    Raises:
        OSError: the program could not be started.
    """
    # A session of its own, so that Ctrl-C on a terminal does not end the program: the service still needs its agents while it stops.
    process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=dict(env), start_new_session=True, limit=CHUNK_BYTES)
    return ProcessPipe(process)


class ProcessPipe:
    """See `core.pipe.Pipe`. However the service ends, the program ends as well, because its standard input is closed."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None, "the program was started with pipes"
        assert process.stdout is not None, "the program was started with pipes"
        assert process.stderr is not None, "the program was started with pipes"
        self.pid = process.pid
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._stderr_end = asyncio.create_task(_read_end_of(process.stderr))

    async def read(self) -> bytes:
        """See `Pipe`."""
        return await self._stdout.read(CHUNK_BYTES)

    async def write(self, data: bytes) -> None:
        """See `Pipe`."""
        self._stdin.write(data)
        await self._stdin.drain()

    async def wait_for_exit(self) -> str:
        """See `Pipe`."""
        code = await self._process.wait()
        stderr = (await asyncio.shield(self._stderr_end)).decode(errors="replace").strip()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the relay {how}: {stderr or 'it wrote nothing to its standard error'}" if code or stderr else ""

    async def end_program(self) -> None:
        """See `Pipe`."""
        self._stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # including the processes that it has started, which would keep its output open
        # The output is read to its end, because the descriptors are not closed before.
        while await self._stdout.read(CHUNK_BYTES):
            pass
        await asyncio.shield(self._stderr_end)
        await self._process.wait()


async def _read_end_of(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end, and return its last `STDERR_BYTES` bytes."""
    end = b""
    while data := await stream.read(CHUNK_BYTES):
        end = (end + data)[-STDERR_BYTES:]
    return end

"""A pipe to the agent's relay for engines that start programs with a command: the relay itself, or `docker exec -i`."""

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
SAID_BYTES = 2000


async def open_process_pipe(argv: Sequence[str], env: Mapping[str, str]) -> ProcessPipe:
    """Start a program and give its standard input and output.

    Raises:
        OSError: it could not be started.
    """
    # In a session of its own: Ctrl-C on a terminal is for the service, which still needs its agents while it stops.
    process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=dict(env), start_new_session=True, limit=CHUNK_BYTES)
    return ProcessPipe(process)


class ProcessPipe:
    """See `core.pipe.Pipe`. The program ends with the service, however that ends: its standard input is closed."""

    def __init__(self, process: Process) -> None:
        assert process.stdin is not None, "the program was started with pipes"
        assert process.stdout is not None, "the program was started with pipes"
        assert process.stderr is not None, "the program was started with pipes"
        self.pid = process.pid
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._said = asyncio.create_task(_last_of(process.stderr))

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
        said = (await asyncio.shield(self._said)).decode(errors="replace").strip()
        how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return f"the relay {how}: {said or 'it said nothing'}" if code or said else ""

    async def close(self) -> None:
        """See `Pipe`."""
        self._stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_S):
                await self._process.wait()
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)  # with what it has started, which would hold its output open
        # Read to the end, or the descriptors would stay.
        while await self._stdout.read(CHUNK_BYTES):
            pass
        await asyncio.shield(self._said)
        await self._process.wait()


async def _last_of(stream: asyncio.StreamReader) -> bytes:
    """Read a stream to its end and keep the last of it."""
    said = b""
    while data := await stream.read(CHUNK_BYTES):
        said = (said + data)[-SAID_BYTES:]
    return said

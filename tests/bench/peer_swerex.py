"""SWE-ReX on this machine: its own server and its own client, `bash -c true`, nothing isolated.

Reads the name of a measurement (`one_call_s` or `rate`) from each line of stdin, and prints its result as one line. Ends at the end of stdin.
Runs in a virtual environment of its own that has `swe-rex` and `aiohttp`; nothing of this project is imported here.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

from swerex.runtime.abstract import Command
from swerex.runtime.remote import RemoteRuntime

ONE_CALL_LAPS = 40
RATE_LAPS = 120
CLIENTS = 8


async def execute(runtime: RemoteRuntime) -> None:
    """Run the command once."""
    await runtime.execute(Command(command=["bash", "-c", "true"]))


async def one_call_s(runtime: RemoteRuntime) -> float:
    """Return the median time of a call, in seconds, with one call after the other."""
    laps_s = []
    for _ in range(ONE_CALL_LAPS):
        begin = time.perf_counter()
        await execute(runtime)
        laps_s.append(time.perf_counter() - begin)
    return statistics.median(laps_s)


async def rate(runtime: RemoteRuntime) -> float:
    """Return the number of calls per second with several clients."""
    remaining = iter(range(RATE_LAPS))

    async def client() -> None:
        for _ in remaining:
            await execute(runtime)

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return RATE_LAPS / (time.perf_counter() - begin)


async def serve_measurements(port: int, token: str) -> None:
    """Measure what each line of stdin names, against a server that is starting on this port."""
    runtime = RemoteRuntime(auth_token=token, host="http://127.0.0.1", port=port, timeout=60)
    await runtime.wait_until_alive(timeout=60)
    measurements = {"one_call_s": one_call_s, "rate": rate}
    await one_call_s(runtime)  # the first calls of a process are slower, and do not count
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(await measurements[line.strip()](runtime), flush=True)


def main() -> None:
    """Start the server, serve measurements until stdin ends, end the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    program = Path(sys.executable).parent / "swerex-remote"
    server = subprocess.Popen(
        [str(program), "--host", "127.0.0.1", "--port", str(port), "--auth-token", token], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        asyncio.run(serve_measurements(port, token))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

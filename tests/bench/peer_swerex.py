"""SWE-ReX on this machine: its own server, its own client, `bash -c true`, nothing isolated. Prints one JSON object.

Runs in a virtual environment of its own that has `swe-rex` and `aiohttp`; nothing of this project is imported here.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from swerex.runtime.abstract import Command
from swerex.runtime.remote import RemoteRuntime

LAPS = 200
CLIENTS = 8


async def p50_s(call: Callable[[], Awaitable[object]], laps: int) -> float:
    """The median time of a call made so many times, one after the other."""
    took = []
    for _ in range(laps):
        begin = time.perf_counter()
        await call()
        took.append(time.perf_counter() - begin)
    return statistics.median(took)


async def rate(call: Callable[[], Awaitable[object]], calls: int) -> float:
    """Calls a second with several clients."""
    waiting = iter(range(calls))

    async def client() -> None:
        for _ in waiting:
            await call()

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return calls / (time.perf_counter() - begin)


async def measure(port: int, token: str) -> dict[str, float]:
    """Both numbers, against a server that is starting on this port."""
    runtime = RemoteRuntime(auth_token=token, host="http://127.0.0.1", port=port, timeout=60)
    await runtime.wait_until_alive(timeout=60)

    async def execute() -> object:
        return await runtime.execute(Command(command=["bash", "-c", "true"]))

    await p50_s(execute, 20)
    return {"p50_s": await p50_s(execute, LAPS), "rate": await rate(execute, 2 * LAPS)}


def main() -> None:
    """Start the server, measure, end the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    token = secrets.token_hex(16)
    program = Path(sys.executable).parent / "swerex-remote"
    server = subprocess.Popen(
        [str(program), "--host", "127.0.0.1", "--port", str(port), "--auth-token", token], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        print(json.dumps(asyncio.run(measure(port, token))))
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()

"""The uplink of the router: the program `pasta`, which makes ordinary connections of the machine out of the packets that the rules of the router let pass."""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import signal
import subprocess
from typing import Callable

from sandbox_server.agent.network.router import UPLINK_NAME

log = logging.getLogger(__name__)

_PROGRAM = "pasta"
#: No port of the machine leads to slots, none of its own addresses or loopback ports leads to the machine, and IPv6 and configuration of hosts are off.
_OPTIONS = (
    "--foreground", "--quiet", "--ipv4-only", "--no-map-gw", "--no-dhcp", "--no-ndp", "--no-ra", "--no-dhcpv6",
    "--tcp-ports", "none", "--udp-ports", "none", "--tcp-ns", "none", "--udp-ns", "none", "--netns-only", "--no-netns-quit",
)  # fmt: skip
_SETTLED_AFTER_S = 0.3
_RESTART_PAUSES_S = (0.1, 0.5, 2.0, 5.0)
_LINGERS_S = 5.0
_LINE_BYTES = 1 << 14


def find_uplink_program() -> str:
    """Return the path of `pasta`.

    Raises:
        OSError: it is not installed.
    """
    path = shutil.which(_PROGRAM)
    if path is None:
        raise OSError(errno.ENOENT, "the program pasta is not in PATH (on Debian, the package passt)")
    return path


class Uplink:
    """Keeps the program of the uplink running. When it has ended, connections through it are lost, and new ones go through another one.

    Args:
        program: the path of the program.
        namespace_path: a path of the network namespace of the router.
        address: the address of the router on the uplink.
        gateway: the neighbour there.
    """

    def __init__(self, program: str, namespace_path: str, address: str, gateway: str, on_failed: Callable[[str], None]) -> None:
        addresses = ("--address", address, "--netmask", "30", "--gateway", gateway, "--ns-ifname", UPLINK_NAME)
        self._command = [program, *_OPTIONS, *addresses, "--netns", namespace_path]
        self._on_failed = on_failed
        self._watching: asyncio.Task[None] | None = None

    async def start_uplink(self) -> None:
        """Start the program.

        Raises:
            OSError: it could not be started, or has ended at once; the text says what it has written.
        """
        run = asyncio.get_running_loop().create_task(self._run_program())
        done, _ = await asyncio.wait([run], timeout=_SETTLED_AFTER_S)
        if done:
            raise OSError(errno.EIO, "pasta has ended: %s" % run.result())
        self._watching = asyncio.get_running_loop().create_task(self._watch(run))

    async def _watch(self, run: asyncio.Task[str]) -> None:
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            began = loop.time()
            try:
                line = await run
            except OSError as error:
                line = str(error)
            attempt = 1 if loop.time() - began > _LINGERS_S else attempt + 1
            if attempt > len(_RESTART_PAUSES_S):
                self._on_failed("pasta ends again and again: %s" % line)
                return
            log.warning("the uplink of the slots is started again, because pasta has ended: %s", line)
            await asyncio.sleep(_RESTART_PAUSES_S[attempt - 1])
            run = loop.create_task(self._run_program())

    async def _run_program(self) -> str:
        """Run the program to its end. Returns the last line that it has written, or how it has ended.

        This process cannot have threads, which the processes of asyncio need, because its children are in another process namespace.
        """
        null = subprocess.DEVNULL
        process = subprocess.Popen(self._command, stdin=null, stdout=null, stderr=subprocess.PIPE, env={}, cwd="/")
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stderr)
        last = b""
        while True:
            try:
                line = await reader.readline()
            except ValueError:  # A line that is too long is left out.
                continue
            if not line:
                break
            # It writes such a line for each message that the log of the system does not take.
            last = line.strip() if line.strip() and b"to syslog" not in line else last
        transport.close()
        process.kill()  # It may have closed its standard error without an end.
        code = process.wait()
        if last:
            return last.decode("utf-8", "replace")
        return "signal %s" % signal.Signals(-code).name if code < 0 else "exit code %d" % code

"""The service under test: its state folder on a small disk of its own, its process, which is restarted whenever it ends, and its agents."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import yaml

from tests.faults import links
from tests.faults.history import History
from tests.faults.requirements import clock_problem, fake_clock, faketime_library
from tests.faults.schedule import WEIGHTS
from tests.support.prepared.process import PreparedCommand
from tests.support.prepared.service import prepared_service
from tests.support.service import TRANSPORT_VARIABLE, clean_environ
from tests.support.users import ROOT

DISK_MB = 96
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 20.0
RETRY_AFTER_S = 0.3
READY_TIMEOUT_S = 8.0
POLL_INTERVAL_S = 0.1
LOG_TAIL_CHARACTERS = 2000
"""How much of the service's log a violation quotes, in characters."""
# Below the range from which the kernel takes ports for outgoing connections, so that no connection takes the port while the service is down.
PORTS = range(20_000, 32_000)


def reserve_port() -> socket.socket:
    """Return a socket that holds a port of the loopback device. Whoever sets SO_REUSEADDR, as the service does, can still listen on that port.

    While the service is down, the port would otherwise be found free by another run of this harness, whose clients and service would then meet ours.
    """
    for port in random.sample(PORTS, len(PORTS)):
        holder = socket.socket()
        try:
            holder.bind(("127.0.0.1", port))
        except OSError:
            holder.close()
            continue
        # Set only now: a bind with it would succeed on a port that another run holds.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return holder
    raise OSError(errno.EADDRINUSE, "no port is free")


class PreparedServiceProcess:
    """A service in a child of the prepared process, with those methods of `asyncio.subprocess.Process` that are used here.

    Args:
        command: the service.
    """

    def __init__(self, command: PreparedCommand) -> None:
        self._command = command
        self.pid = command.pid
        self.returncode: int | None = None

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def wait(self) -> int:
        """Wait for the end of the service; return its exit status."""
        await _wait_until_readable(self._command.fileno())
        self.returncode = self._command.wait()
        return self.returncode


class ServiceUnderTest:
    """The service, its disk, its clock and its agents.

    Args:
        history: what happens is recorded there.
        settings: the content of the settings file.
        transport: how the service reaches its agents.
        fakes_clock: whether the wall clock of the service can be set. The library that does this slows the service down, and makes some sleeps fail.
    """

    def __init__(self, history: History, settings: Mapping[str, Any], transport: str, *, fakes_clock: bool = True) -> None:
        self.history = history
        self._port_holder = reserve_port()
        self.port: int = self._port_holder.getsockname()[1]
        self._transport = transport
        self.folder = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
        self.state_dir = self.folder / "state"
        self.state_dir.mkdir(mode=0o711)
        self._mount_problem = _mount(self.state_dir)
        self.log_path = self.folder / "log"
        self.up = asyncio.Event()
        self.starts = 0
        self.sandbox_records: dict[str, dict[str, Any]] = {}
        self._state_file = self.state_dir / "state.db"
        self._config = self.folder / "config.yaml"
        self._config.write_text(yaml.safe_dump(dict(settings)), encoding="utf-8")
        self._clock = self.folder / "clock"
        self._clock.write_text("+0\n", encoding="ascii")
        self._faketime = faketime_library()
        self._clock_problem = clock_problem(self._faketime, self.folder, clean_environ({})) if fakes_clock else "no jump is planned"
        self._process: asyncio.subprocess.Process | PreparedServiceProcess | None = None
        self._wanted = True
        self._killed = False
        self._pause_s = 0.0

    def impossible(self) -> dict[str, str]:
        """Return the kinds of fault that cannot be injected on this machine, each with its reason. The others need no privilege."""
        problems = {"link.cut": links.permission_problem(), "disk.fill": self._mount_problem, "clock.jump": self._clock_problem}
        return {what: why for what, why in problems.items() if why is not None}

    def possible(self) -> set[str]:
        """Return the kinds of fault that can be injected on this machine."""
        return set(WEIGHTS) - set(self.impossible())

    # The process of the service.

    async def keep_running(self) -> None:
        """Start the service, and start it again whenever it has ended, until `stop` is called."""
        while self._wanted:
            began_at = self.history.now()
            self._killed = False
            status = await self._run_once()
            self.up.clear()
            self.history.note("service", what="ended", status=status)
            if not self._end_was_expected():
                self.history.note("died", status=status, began_at=began_at, words=self.log_tail())
            if self._wanted:
                await asyncio.sleep(self._pause_s if self._killed else RETRY_AFTER_S)

    def _end_was_expected(self) -> bool:
        return self._killed or not self._wanted

    async def _run_once(self) -> int:
        read_end, write_end = os.pipe()
        with self.log_path.open("ab") as log:
            self._process = process = await self._start(log, write_end)
        os.close(write_end)
        if not self._wanted:
            process.terminate()
        try:
            if await _wait_for_byte(read_end):
                self.starts += 1
                self.history.note("service", what="listens", pid=process.pid)
                self.up.set()
        finally:
            os.close(read_end)
        return await process.wait()

    async def _start(self, log: BinaryIO, ready: int) -> asyncio.subprocess.Process | PreparedServiceProcess:
        words, environ = ["serve", "--port", str(self.port), "--ready-fd"], clean_environ(self._environ())
        if not self._fake_clock() and prepared_service().has_limits_of_this_process():
            with open(os.devnull, "rb") as nothing:
                streams = (nothing.fileno(), log.fileno(), log.fileno(), ready)
                return PreparedServiceProcess(prepared_service().start([*words, "3"], environ, ROOT, streams))
        # The library with which the clock is set must be there before the interpreter starts.
        command = [sys.executable, "-m", "sandbox_server", *words, str(ready)]
        return await asyncio.create_subprocess_exec(*command, env=environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=[ready])

    def _environ(self) -> dict[str, str]:
        settings = {"SANDBOX_CONFIG": str(self._config), "SANDBOX_STATE_DIR": str(self.state_dir), TRANSPORT_VARIABLE: self._transport}
        return settings | self._fake_clock()

    def _fake_clock(self) -> dict[str, str]:
        if self._faketime is None or self._clock_problem is not None:
            return {}
        return fake_clock(self._faketime, self._clock)

    def kill(self, pause_s: float) -> bool:
        """Kill the service with SIGKILL; it is started again after a pause.

        It is not killed between the deletion of its state file and the moment when it has written a new one: both faults together lose everything.

        Returns:
            Whether the service was running.
        """
        self._pause_s = pause_s
        if self._process is None or self._process.returncode is not None or self._killed or not self._state_file.exists():
            return False
        self._killed = True
        self._process.kill()
        return True

    def delete_state(self) -> bool:
        """Delete the state file of the running service, and the files that SQLite keeps beside it. Return whether the service was running."""
        if not self.up.is_set() or self._process is None or self._process.returncode is not None or self._killed:
            return False
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self._state_file}{suffix}").unlink(missing_ok=True)
        return True

    async def ready(self) -> None:
        """Wait until the service is ready, at most `READY_TIMEOUT_S`: a fault may keep it from becoming ready."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_TIMEOUT_S), httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", trust_env=False, verify=False) as http:
                while True:
                    await self.up.wait()
                    with suppress(httpx.TransportError):
                        if (await http.get("/readyz")).status_code == httpx.codes.OK:
                            return
                    await asyncio.sleep(POLL_INTERVAL_S)

    async def stop(self, keep_running_task: asyncio.Task[None]) -> None:
        """Stop the service, which destroys its sandboxes, and wait for its end."""
        self._wanted = False
        assert self._process is not None, "it has been started"
        if self._process.returncode is None:
            self._process.terminate()
        done, _ = await asyncio.wait({keep_running_task}, timeout=STOP_TIMEOUT_S)
        if not done:
            self.history.note("leak", what=f"the service has not ended within {STOP_TIMEOUT_S:g} s of SIGTERM")
            self._process.kill()
        await keep_running_task

    def cut_links(self, share: float) -> int:
        """Cut a share of the service's connections to its agents. Return how many were cut."""
        if self._process is None or self._process.returncode is not None:
            return 0
        return links.cut(self._process.pid, share, self.state_dir)

    def log_tail(self) -> str:
        """Return the end of the service's log."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL_CHARACTERS:]

    # The sandboxes.

    def read_sandbox_records(self) -> dict[str, dict[str, Any]]:
        """Return the records of the sandboxes that have a folder now, by sandbox id. Records that were ever read stay in `sandbox_records`."""
        found = {}
        for path in self.state_dir.glob("sandboxes/*/handle.json"):
            with suppress(FileNotFoundError):
                data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["data"]
                found[path.parent.name] = data
        self.sandbox_records.update(found)
        return found

    def agents(self) -> list[tuple[str, int]]:
        """Return the sandbox ids and pids of the running agents, sorted by sandbox id."""
        running = []
        for sandbox_id, data in sorted(self.read_sandbox_records().items()):
            if "pid" in data and self._is_agent(data["pid"]):
                running.append((sandbox_id, data["pid"]))
        return running

    def _is_agent(self, pid: int) -> bool:
        with suppress(FileNotFoundError, ProcessLookupError):
            return str(self.state_dir).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        return False

    # The disk and the clock.

    def fill_disk(self) -> None:
        """Fill the service's disk."""
        with open(self.state_dir / "filler", "wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while True:
                        filler.write(bytes(size))

    def free_disk(self) -> None:
        """Free the service's disk."""
        (self.state_dir / "filler").unlink(missing_ok=True)

    def set_clock(self, offset_s: int) -> None:
        """Set the wall clock of the service to an offset from the real time, in seconds."""
        partial = self._clock.with_suffix(".new")
        partial.write_text(f"{offset_s:+d}\n", encoding="ascii")
        partial.replace(self._clock)

    def close(self) -> None:
        """Give the port back, unmount the disk and delete the folder."""
        self._port_holder.close()
        if self._mount_problem is None:
            subprocess.run(["umount", "--lazy", str(self.state_dir)], check=True)
        subprocess.run(["rm", "-rf", "--one-file-system", str(self.folder)], check=True)


def signal_agent(pid: int, number: signal.Signals) -> None:
    """Send a signal to an agent that may have ended meanwhile."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _mount(path: Path) -> str | None:
    """Mount a small disk on a folder. Return the reason why that is not possible, or None where it is mounted."""
    if os.geteuid() != 0:
        return "only root can mount a small disk for the service's state"
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m,mode=711", "sandbox-pool-faults", str(path)]
    tried = subprocess.run(command, check=False, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"a tmpfs cannot be mounted: {tried.stderr.strip()}"


async def _wait_for_byte(descriptor: int) -> bool:
    """Return whether a byte arrives before the other end closes."""
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await _wait_until_readable(descriptor)
        return bool(os.read(descriptor, 1))
    except TimeoutError:
        return False


async def _wait_until_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)

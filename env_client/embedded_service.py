"""An embedded service: started as a child process, on a free port, with a state folder that is deleted at its end."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from env_client.client import AsyncSandboxClient, SandboxClient
from env_client.errors import EmbeddedFailed
from env_client.retry import RetryPolicy

#: How long the service may take until it listens, in seconds.
START_TIMEOUT_S = 30.0
#: How long the service may take to end its sandboxes, in seconds.
STOP_TIMEOUT_S = 15.0


class ClientOptions(TypedDict, total=False):
    """The options of a client of an embedded service."""

    retry: RetryPolicy | None
    max_connections: int | None


def embedded(pools: Mapping[str, Mapping[str, Any]] | None = None, *, default_pool: str | None = None, start_s: float = START_TIMEOUT_S) -> EmbeddedService:
    """Start a service on this machine, for this program alone: `with embedded() as service, service.client() as client: …`.

    Args:
        pools: pool specs by name, as in the settings file; default one pool named `default`. Their sandboxes end with the service.
        default_pool: the pool for acquires that name none; default the only pool, else `default`.
        start_s: how long the service may take until it listens, in seconds.

    Raises:
        EmbeddedFailed: the service did not start; the detail contains its error message.
        ValueError: `pools` is empty.
    """
    if pools is not None and not pools:
        raise ValueError("an embedded service needs a pool: name at least one, or leave out `pools` for one named 'default'")
    specs = {"default": {}} if pools is None else pools
    return EmbeddedService(specs, default_pool or (next(iter(specs)) if len(specs) == 1 else "default"), start_s)


class EmbeddedService:
    """A running service. It ends when `close` is called, and when this process ends for any reason.

    Attributes:
        url: the address of the service.
        token: the token of the service.
        state_dir: the state folder, which is deleted at the end.
    """

    def __init__(self, pools: Mapping[str, Mapping[str, Any]], default_pool: str, start_s: float) -> None:
        with ExitStack() as resources:  # closed at once if anything fails, also on Ctrl-C: neither the process nor its folder may stay
            self.state_dir = Path(tempfile.mkdtemp(prefix="sandbox-pool-"))
            # The service deletes the folder itself. If it was killed, an agent that is still ending may write to the folder, hence `ignore_errors`.
            resources.callback(shutil.rmtree, self.state_dir, ignore_errors=True)
            self._log = resources.enter_context(tempfile.TemporaryFile())
            ready_fd, announce_fd = os.pipe()
            with os.fdopen(ready_fd, "rb"):
                try:
                    self._process = self._start_process(pools, default_pool, announce_fd)
                finally:
                    os.close(announce_fd)
                resources.callback(self._end_process)
                self.url = self._wait_for_url(ready_fd, time.monotonic() + start_s)
            self.token = (self.state_dir / "token").read_text().strip()
            self._resources = resources.pop_all()

    @property
    def pid(self) -> int:
        """The process id of the service."""
        return self._process.pid

    def client(self, **options: Unpack[ClientOptions]) -> SandboxClient:
        """Create a client of this service."""
        return SandboxClient(self.url, self.token, **options)

    def async_client(self, **options: Unpack[ClientOptions]) -> AsyncSandboxClient:
        """Create an asyncio client of this service."""
        return AsyncSandboxClient(self.url, self.token, **options)

    def close(self) -> None:
        """End the service and its sandboxes, and delete its state folder."""
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _end_process(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start_process(self, pools: Mapping[str, Mapping[str, Any]], default_pool: str, announce_fd: int) -> subprocess.Popen[bytes]:
        """Start the service. It writes its address to `announce_fd` once it listens."""
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SANDBOX_") or name.startswith("SANDBOX_LOG_")}
        environ["SANDBOX_STATE_DIR"] = str(self.state_dir)
        config = self.state_dir / "pools.yaml"
        specs = {name: {**spec, "on_shutdown": "destroy"} for name, spec in pools.items()}
        config.write_text(json.dumps({"pools": specs, "default_pool": default_pool}))  # JSON is a subset of YAML
        environ["SANDBOX_CONFIG"] = str(config)
        command = [sys.executable, "-m", "sandbox_server", "serve", "--host", "127.0.0.1", "--port", "0"]
        return subprocess.Popen(
            [*command, "--ready-fd", str(announce_fd), "--exit-with-parent", "--ephemeral"],
            stdin=subprocess.PIPE,  # its end of file tells the service that this process has ended
            stdout=self._log,
            stderr=self._log,
            pass_fds=(announce_fd,),
            env=environ,
            start_new_session=True,  # Ctrl-C must reach only this process, which releases its leases before the service ends
        )

    def _wait_for_url(self, ready_fd: int, deadline_s: float) -> str:
        """Wait for the line with which the service announces its address.

        Raises:
            EmbeddedFailed: the service ended, or did not listen before the deadline.
        """
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([ready_fd], [], [], max(0.0, deadline_s - time.monotonic()))
            chunk = os.read(ready_fd, 4096) if readable else b""
            if not chunk:
                reason = "ended" if readable else "did not listen in time"
                raise EmbeddedFailed(f"the embedded service {reason}{self._error_from_log()}")
            line += chunk
        return str(json.loads(line)["url"])

    def _error_from_log(self) -> str:
        """Return the error message in the log of the service; for a missing package, how to install it."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        if lines and "No module named" in lines[-1]:
            return f": {lines[-1].rpartition(': ')[2]}; in a clone of the repository: pip install '.[server]'"
        plain_lines = [line for line in lines if not line.startswith("{")]
        exceptions = [_exception_in_log_line(line) for line in lines if '"exception"' in line]
        message = plain_lines or exceptions[-1:] or lines[-1:]
        if message and message[0].startswith("Traceback"):
            message = message[-1:]
        return f": {' '.join(message)[-1000:]}" if message else ""


def _exception_in_log_line(line: str) -> str:
    """Return the last line of the exception in a JSON log line; the whole log line if there is none."""
    try:
        return str(json.loads(line)["exception"]).strip().splitlines()[-1]
    except (ValueError, LookupError, TypeError):
        return line

"""A service of one's own: started as a process, on a free port, with a state folder that goes with it."""

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
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

from env_client.client import AsyncSandboxClient, SandboxClient
from env_client.errors import EmbeddedFailed
from env_client.retry import RetryPolicy

#: How long the service may take to listen, in seconds.
START_S = 30.0
#: How long it may take to end its sandboxes, in seconds.
STOP_S = 15.0


class ClientOptions(TypedDict, total=False):
    """What a client may be told beside where the service is."""

    retry: RetryPolicy | None
    max_connections: int | None


def embedded(pools: Mapping[str, Mapping[str, Any]] | None = None, *, default_pool: str | None = None, start_s: float = START_S) -> EmbeddedService:
    """Start a service of one's own on this machine: `with embedded() as service, service.client() as client: …`.

    Args:
        pools: pool specs by name, as in the settings file; default one pool `default`. Their sandboxes end with the service.
        default_pool: which of them an acquire that names none is for; default the only one, else `default`.
        start_s: how long it may take to listen, in seconds.

    Raises:
        EmbeddedFailed: it did not start; the detail has its own last words.
        ValueError: `pools` is empty.
    """
    if pools is not None and not pools:
        raise ValueError("a service of one's own needs a pool: leave pools out for one named 'default', or name at least one")
    specs = {"default": {}} if pools is None else pools
    return EmbeddedService(specs, default_pool or (next(iter(specs)) if len(specs) == 1 else "default"), start_s)


class EmbeddedService:
    """A running service that ends with this object, and with this process however that ends.

    Its `url`, its `token`, and the `state_dir` that goes with it.
    """

    def __init__(self, pools: Mapping[str, Mapping[str, Any]], default_pool: str, start_s: float) -> None:
        self.state_dir = Path(tempfile.mkdtemp(prefix="sandbox-pool-"))
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in `close`, as the rest
        ready, announce = os.pipe()
        try:
            self._process = self._start(pools, default_pool, announce)
        finally:
            os.close(announce)
        try:
            self.url = self._announced(ready, time.monotonic() + start_s)
            self.token = (self.state_dir / "token").read_text().strip()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(ready)

    @property
    def pid(self) -> int:
        """The service's process id."""
        return self._process.pid

    def client(self, **options: Unpack[ClientOptions]) -> SandboxClient:
        """A client of this service."""
        return SandboxClient(self.url, self.token, **options)

    def async_client(self, **options: Unpack[ClientOptions]) -> AsyncSandboxClient:
        """A client of this service."""
        return AsyncSandboxClient(self.url, self.token, **options)

    def close(self) -> None:
        """End the service and its sandboxes, and remove its state."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        # The service removes it too; after a kill, the last of its agents may still be at it.
        shutil.rmtree(self.state_dir, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _start(self, pools: Mapping[str, Mapping[str, Any]], default_pool: str, announce: int) -> subprocess.Popen[bytes]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SANDBOX_") or name.startswith("SANDBOX_LOG_")}
        environ["SANDBOX_STATE_DIR"] = str(self.state_dir)
        config = self.state_dir / "pools.yaml"
        specs = {name: {**spec, "on_shutdown": "destroy"} for name, spec in pools.items()}
        config.write_text(json.dumps({"pools": specs, "default_pool": default_pool}))  # JSON is YAML
        environ["SANDBOX_CONFIG"] = str(config)
        serve = [sys.executable, "-m", "sandbox_server", "serve", "--host", "127.0.0.1", "--port", "0"]
        return subprocess.Popen(
            [*serve, "--ready-fd", str(announce), "--exit-with-parent", "--ephemeral"],
            stdin=subprocess.PIPE,  # its end of file is our end
            stdout=self._log,
            stderr=self._log,
            pass_fds=(announce,),
            env=environ,
            start_new_session=True,  # Ctrl-C is for this process, which still has leases to give back
        )

    def _announced(self, ready: int, deadline_s: float) -> str:
        """Wait for the line that says where the service listens."""
        line = b""
        while not line.endswith(b"\n"):
            readable, _, _ = select.select([ready], [], [], max(0.0, deadline_s - time.monotonic()))
            chunk = os.read(ready, 4096) if readable else b""
            if not chunk:
                how = "ended" if readable else "did not listen in time"
                raise EmbeddedFailed(f"the embedded service {how}{self._last_words()}")
            line += chunk
        return str(json.loads(line)["url"])

    def _last_words(self) -> str:
        """Why the service ended, as it said itself; where its package is missing, how to get it."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        if lines and "No module named" in lines[-1]:
            return f": {lines[-1].rpartition(': ')[2]}; in a clone of the repository: pip install '.[server]'"
        told = [line for line in lines if not line.startswith("{")] or [_gist(line) for line in lines if '"exception"' in line][-1:] or lines[-1:]
        if told and told[0].startswith("Traceback"):
            told = told[-1:]
        return f": {' '.join(told)[-1000:]}" if told else ""


def _gist(line: str) -> str:
    """The last line of the exception that a line of the log carries."""
    try:
        return str(json.loads(line)["exception"]).strip().splitlines()[-1]
    except (ValueError, LookupError, TypeError):
        return line

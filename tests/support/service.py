"""A real service in a process of its own, with a real port, a private state folder, and a log that is shown when a test fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import httpx
import yaml

from sandbox_server.agent.kernel.trash import delete_tree
from tests.support import service_main
from tests.support.prepared.process import PreparedCommand
from tests.support.prepared.service import prepared_service
from tests.support.users import ME, Runner

TRANSPORT_VARIABLE = "SANDBOX_LOCAL_TRANSPORT"
START_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 20.0

# The pool that most tests use: small, and destroyed with the service.
SMALL_POOL: Mapping[str, Any] = {"backend": "local", "slots_per_sandbox": 8, "min_sandboxes": 1, "max_sandboxes": 2, "on_shutdown": "destroy"}


@dataclass(kw_only=True)
class Service:
    """A running service: its address, its token, and its log."""

    url: str
    state_dir: Path
    process: subprocess.Popen[bytes] | PreparedCommand
    log_path: Path
    stopped: bool = field(default=False)

    @property
    def token(self) -> str:
        """The token that the service created at its first start."""
        return (self.state_dir / "token").read_text(encoding="utf-8").strip()

    @property
    def headers(self) -> dict[str, str]:
        """The headers of an authenticated request."""
        return {"Authorization": f"Bearer {self.token}"}

    @property
    def log(self) -> str:
        """The log of the service so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables with which a client finds the service."""
        return {"SANDBOX_URL": self.url, "SANDBOX_TOKEN": self.token, "SANDBOX_STATE_DIR": str(self.state_dir)}

    def http(self, **options: Any) -> httpx.Client:
        """Create an authenticated HTTP client of the service."""
        # There is no TLS to verify. Reading the certificates that httpx would verify with takes 26 ms of processor time for each client.
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=60.0, trust_env=False, verify=False, **options)

    def stop(self) -> int:
        """Stop the service and wait for its end; return its exit code."""
        if not self.stopped:
            self.stopped = True
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise AssertionError(f"the service did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM:\n{self.log}") from None
        return self.process.returncode


def clean_environ(extra: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of this process without the service's own variables, with `extra` added."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("SANDBOX_")}
    return kept | dict(extra)


@contextlib.contextmanager
def short_folder(runner: Runner = ME) -> Iterator[Path]:
    """Create a private folder with a short path, because the paths of unix sockets are limited; it is deleted afterwards."""
    path = Path(tempfile.mkdtemp(prefix="sp-", dir="/tmp"))
    try:
        runner.own(path)
        yield path
    finally:
        with contextlib.suppress(OSError):  # sandboxes that still run may write to the folder
            delete_tree(str(path))  # shutil.rmtree does not delete trees of this depth


def end_sandboxes_left(state_dir: Path) -> None:
    """End the agents that a service with this state folder has left running, because their pools outlive it."""
    for record in state_dir.glob("sandboxes/*/handle.json"):
        pid = json.loads(record.read_text(encoding="utf-8"))["data"].get("pid")
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            if pid is not None and str(state_dir).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


def start_serve(
    arguments: Sequence[str], environ: Mapping[str, str], log: BinaryIO, ready_descriptor: int, runner: Runner = ME, stdout: BinaryIO | None = None
) -> subprocess.Popen[bytes] | PreparedCommand:
    """Start `serve`: in a child of the prepared process, unless the service runs as another user or within other limits than that.

    Args:
        arguments: The arguments of `serve`.
        environ: All environment variables of the service, with those of `ServiceParts.environ` if it has other parts than in production.
        log: Its standard error, and its standard output unless `stdout` is given.
        ready_descriptor: Where it writes its address once it listens.
        runner: Whom it runs as.
        stdout: Its standard output.
    """
    out = stdout if stdout is not None else log
    if runner is ME and prepared_service().has_limits_of_this_process():
        with open(os.devnull, "rb") as nothing:
            streams = (nothing.fileno(), out.fileno(), log.fileno(), ready_descriptor)
            return prepared_service().start(["serve", "--ready-fd", "3", *arguments], environ, runner.cwd, streams)
    module = service_main.__name__ if service_main.VARIABLE in environ else "sandbox_server"
    return subprocess.Popen(
        [runner.python, "-m", module, "serve", "--ready-fd", str(ready_descriptor), *arguments],
        env=environ,
        cwd=runner.cwd,
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=log,
        pass_fds=[ready_descriptor],
        **runner.popen_options,
    )


@contextlib.contextmanager
def running_service(
    settings: Mapping[str, Any] | None = None,
    *,
    env: Mapping[str, str] | None = None,
    runner: Runner = ME,
    arguments: Sequence[str] = (),
    wait_ready: bool = True,
) -> Iterator[Service]:
    """Start a service, wait until it is ready, stop it and remove its state folder at the end.

    Args:
        settings: The settings file as a mapping; one small pool named `default` if not given.
        env: Further environment variables of the service; see also `ServiceParts.environ`.
        runner: Whom it runs as.
        arguments: Further arguments of `serve`.
        wait_ready: Whether to wait for `/readyz`, not just for the port.

    Raises:
        AssertionError: It ended or was not ready in time; the message carries its log.
    """
    with short_folder(runner) as folder:
        config = folder / "config.yaml"
        said = dict(settings if settings is not None else {"pools": {"default": dict(SMALL_POOL)}})
        # By default, sandboxes outlive the service.
        said["pools"] = {name: {"on_shutdown": "destroy", **(spec or {})} for name, spec in said.get("pools", {"default": {}}).items()}
        config.write_text(yaml.safe_dump(said), encoding="utf-8")
        runner.own(config)
        state_dir, log_path = folder / "state", folder / "log"
        environ = clean_environ({"SANDBOX_CONFIG": str(config), "SANDBOX_STATE_DIR": str(state_dir), **runner.environ, **(env or {})})
        read_end, write_end = os.pipe()
        with log_path.open("wb") as log, open(read_end, "rb") as ready, contextlib.ExitStack() as stack:
            process = start_serve(["--host", "127.0.0.1", "--port", "0", *arguments], environ, log, write_end, runner)
            stack.enter_context(process)
            os.close(write_end)
            service = Service(url="", state_dir=state_dir, process=process, log_path=log_path)
            try:
                service.url = listening_url(service, ready)
                if wait_ready:
                    wait_until_ready(service)
                yield service
            finally:
                service.stop()
                end_sandboxes_left(state_dir)
                if sys.exc_info()[0] is not None:
                    print(service.log, file=sys.stderr)


def listening_url(service: Service, ready: BinaryIO) -> str:
    """Wait until a starting service announces its address.

    Raises:
        AssertionError: It ended, or said nothing in time.
    """
    if not select.select([ready], [], [], START_TIMEOUT_S)[0]:
        raise AssertionError(f"the service does not listen {START_TIMEOUT_S:.0f} s after its start:\n{service.log}")
    line = ready.readline()
    if not line:
        service.process.wait(STOP_TIMEOUT_S)
        raise AssertionError(f"the service ended with {service.process.returncode} while starting:\n{service.log}")
    url: str = json.loads(line)["url"]
    return url


def wait_until_ready(service: Service) -> None:
    """Wait until every pool of the settings file has its minimum of sandboxes.

    Raises:
        AssertionError: It ended, or was not ready in time.
    """
    deadline = time.monotonic() + START_TIMEOUT_S
    address = urlsplit(service.url)
    # One request of httpx takes longer than the response of the service.
    with contextlib.closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=10.0)) as connection:
        while (status_and_text := _get(connection, "/readyz"))[0] != http.client.OK:
            assert service.process.poll() is None, f"the service ended with {service.process.returncode} while starting:\n{service.log}"
            assert time.monotonic() < deadline, f"not ready {START_TIMEOUT_S:.0f} s after its start: {status_and_text[1]}\n{service.log}"
            time.sleep(0.02)  # no event reports readiness


def _get(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()

"""The end of a service, under plain uvicorn in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx
import pytest

from tests.support.prepared.process import PreparedCommand
from tests.support.prepared.service import prepared_service
from tests.support.service import START_TIMEOUT_S, clean_environ
from tests.support.service_main import ServiceParts, make_application

ROOT = Path(__file__).parents[3]
ENDS_WITHIN_S = 10.0
SCRIPTED = ServiceParts(scripted_agents=True)
QUICK_STOP = ServiceParts(scripted_agents=True, requests_grace_s=0.2)


@dataclass
class Process:
    """A service that somebody else started."""

    popen: subprocess.Popen[bytes] | PreparedCommand
    url: str
    state_dir: Path
    said: list[str]

    def http(self) -> httpx.Client:
        token = (self.state_dir / "token").read_text().strip()
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=30.0, trust_env=False, verify=False)

    def connect(self) -> socket.socket:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return socket.create_connection((host, int(port)))

    def end(self) -> float:
        """Send SIGTERM; the seconds it takes to end."""
        started = time.monotonic()
        self.popen.send_signal(signal.SIGTERM)
        self.popen.wait(ENDS_WITHIN_S + 5)
        return time.monotonic() - started


@contextlib.contextmanager
def uvicorn_on(state_dir: Path, *arguments: str, descriptors: int | None = None, parts: ServiceParts = SCRIPTED, **environ: str) -> Iterator[Process]:
    """A service of plain uvicorn; `descriptors`: it may open no more files than that, as after `ulimit -n`."""
    read_end, write_end = os.pipe()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        environ = clean_environ({"SANDBOX_STATE_DIR": str(state_dir), **parts.environ(), **environ})
        popen = _start_uvicorn(arguments, environ, listening.fileno(), write_end, descriptors)
    os.close(write_end)
    said: list[str] = []
    begun = threading.Event()
    # To its end: a pipe that nobody empties keeps a service that logs a lot waiting.
    with popen, open(read_end, encoding="utf-8") as output:
        reader = threading.Thread(target=_read, args=(output, said, begun))
        reader.start()
        try:
            begun.wait(START_TIMEOUT_S)
            yield Process(popen, url, state_dir, said)
        finally:
            if popen.poll() is None:
                popen.kill()
            popen.wait()
            reader.join()


def _start_uvicorn(
    arguments: Sequence[str], environ: Mapping[str, str], listening: int, output: int, descriptors: int | None
) -> subprocess.Popen[bytes] | PreparedCommand:
    """Start uvicorn in a child of the prepared process, unless it has a limit of its own."""
    words = ["uvicorn", "--factory", f"{make_application.__module__}:{make_application.__name__}", *arguments]
    with open(os.devnull, "rb") as nothing:
        if descriptors is None:
            return prepared_service().start([*words, "--fd", "3"], environ, ROOT, (nothing.fileno(), output, output, listening))
        command = ["prlimit", f"--nofile={descriptors}:{descriptors}", sys.executable, "-m", *words, "--fd", str(listening)]
        return subprocess.Popen(command, cwd=ROOT, env=environ, stdin=nothing, stdout=output, stderr=output, pass_fds=[listening])


def _read(output: IO[str], said: list[str], begun: threading.Event) -> None:
    for line in output:
        said.append(line)
        if line.startswith("curl ") or "startup complete" in line:  # it is about to serve
            begun.set()
    begun.set()


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Process]:
    """A service that gives its requests as long as in production when it stops."""
    with uvicorn_on(tmp_path / "state") as running:
        yield running


@pytest.fixture
def quick_process(tmp_path: Path) -> Iterator[Process]:
    """A service that gives its requests only a short time when it stops, for requests that do not end by themselves."""
    with uvicorn_on(tmp_path / "state", parts=QUICK_STOP) as running:
        yield running


def acquire(http: httpx.Client) -> str:
    lease_id: str = http.post("/v1/acquire", json={}).json()["leases"][0]["lease_id"]
    return lease_id


def test_it_ends_at_once_when_nobody_asks_anything(process: Process) -> None:
    with process.http() as http:
        assert http.get("/healthz").status_code == 200

        assert process.end() < 5.0


def test_a_running_batch_gets_its_results_before_the_end(quick_process: Process) -> None:
    with quick_process.http() as http:
        lease_id = acquire(http)
        calls = [{"lease_id": lease_id, "tool": "bash", "args": {"command": command}} for command in ("echo done", "hang")]
        body = {"calls": calls}
        with http.stream("POST", "/v1/exec-batch", json=body, headers={"Accept": "application/x-ndjson"}) as stream:
            lines = stream.iter_lines()
            first = json.loads(next(lines))
            quick_process.popen.send_signal(signal.SIGTERM)
            second = json.loads(next(line for line in lines if line))

        assert (first["reason"], first["output"]) == ("exit", "done\n")
        assert second["reason"] == "backend_error"
        assert (second["metadata"]["may_have_run"], second["metadata"]["stopping"]) == (True, True)
        assert quick_process.end() < ENDS_WITHIN_S


def test_who_queues_is_told_to_come_again(tmp_path: Path) -> None:
    config = tmp_path / "pools.yaml"
    config.write_text("pools: {default: {slots_per_sandbox: 1, max_sandboxes: 1}}")
    with (
        uvicorn_on(tmp_path / "state", parts=QUICK_STOP, SANDBOX_CONFIG=str(config)) as process,
        process.http() as http,
        process.connect() as queued,
    ):
        acquire(http)
        body = b'{"wait_s": 60}'
        head = f"POST /v1/acquire HTTP/1.1\r\nHost: h\r\nAuthorization: {http.headers['authorization']}\r\nContent-Length: {len(body)}\r\n\r\n"
        queued.sendall(head.encode() + body)
        while http.get("/v1/pools/default").json()["queue"] == 0:
            pass

        seconds = process.end()

        answer = queued.recv(65536)
        assert b"503" in answer.split(b"\r\n")[0]
        assert b'"draining"' in answer
        assert b'"stopping":true' in answer
        assert b"ask again when it is back" in answer
        assert b"retry-after" in answer.lower()
        assert seconds < ENDS_WITHIN_S


def test_callers_who_neither_send_nor_read_do_not_keep_it(process: Process) -> None:
    with process.http() as http, process.connect() as silent, process.connect() as half, process.connect() as deaf:
        lease_id = acquire(http)
        token = http.headers["authorization"]
        half.sendall(f"POST /v1/acquire HTTP/1.1\r\nHost: h\r\nAuthorization: {token}\r\nContent-Length: 100\r\n\r\n{{".encode())
        http.put(f"/v1/leases/{lease_id}/files", params={"path": "big"}, content=b"x" * (32 << 20))
        deaf.sendall(f"GET /v1/leases/{lease_id}/files?path=big HTTP/1.1\r\nHost: h\r\nAuthorization: {token}\r\n\r\n".encode())
        assert deaf.recv(1)

        assert process.end() < ENDS_WITHIN_S
        assert silent.fileno() != half.fileno()


def test_a_second_service_on_the_same_state_folder_is_refused_in_one_line(process: Process) -> None:
    with uvicorn_on(process.state_dir) as second:
        assert second.popen.wait(20) == 3

    (told,) = [line for line in second.said if "another service" in line]
    assert str(process.state_dir) in told
    assert str(process.popen.pid) in told
    assert "Traceback" not in "".join(second.said)


def test_an_unknown_variable_stops_the_start_in_one_line(tmp_path: Path) -> None:
    with uvicorn_on(tmp_path / "state", SANDBOX_STAT_DIR="/x") as wrong:
        assert wrong.popen.wait(20) == 3

    (told,) = [line for line in wrong.said if "SANDBOX_STAT_DIR" in line]
    assert "SANDBOX_STATE_DIR" in told
    assert "Traceback" not in "".join(wrong.said)


def test_open_event_streams_end_with_it(quick_process: Process) -> None:
    with quick_process.http() as http:
        lease_id = acquire(http)
        call = {"command": "hang", "call_id": "c"}
        with (
            http.stream("GET", "/v1/events") as everything,
            http.stream("POST", f"/v1/leases/{lease_id}/exec", json=call, headers={"Accept": "text/event-stream"}) as running,
            http.stream("GET", f"/v1/leases/{lease_id}/calls/c/events") as again,
        ):
            assert [stream.status_code for stream in (everything, running, again)] == [200, 200, 200]
            seconds = quick_process.end()
            last = running.read()

    assert b'"reason":"backend_error"' in last
    assert seconds < ENDS_WITHIN_S


def test_a_hang_up_signal_reads_the_files_tenants_again(tmp_path: Path) -> None:
    config = tmp_path / "pools.yaml"
    config.write_text("tenants: [{name: a, token: old, admin: true}]")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "token").write_text("old")
    with uvicorn_on(tmp_path / "state", SANDBOX_CONFIG=str(config)) as process, process.http() as http:
        assert http.get("/v1/pools").status_code == 200
        config.write_text("tenants: [{name: a, token: [")
        process.popen.send_signal(signal.SIGHUP)
        assert http.get("/v1/pools").status_code == 200
        config.write_text("tenants: [{name: a, token: new}]")
        process.popen.send_signal(signal.SIGHUP)
        while http.get("/v1/pools").status_code == 200:
            pass
        http.headers["authorization"] = "Bearer new"

        assert http.get("/v1/pools").status_code == 200
        assert process.end() < ENDS_WITHIN_S

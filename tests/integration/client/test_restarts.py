"""Tests of both clients with a real service that is stopped or killed during a call and started again: the call succeeds."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from env_client import Lease, Output, RemoteToolBackend, Result, SandboxClient
from tests.support.service import SMALL_POOL, Service, clean_environ, end_sandboxes_left, listening_url, short_folder, start_serve, wait_until_ready
from tests.support.service_main import ServiceParts

#: Writes output, waits for the file `go`, and writes again. It appends a line to `ran` each time it runs. Its last byte is not UTF-8.
COMMAND = r"printf 'begun\n'; echo ran >> ran; while [ ! -e go ]; do sleep 0.05; done; printf 'done\n\377'"
#: Its whole output in each encoding.
WHOLE = {"base64": b"begun\ndone\n\xff", "utf-8": "begun\ndone\n\N{REPLACEMENT CHARACTER}".encode()}

#: The service stops soon although requests run.
QUICK_STOP = ServiceParts(requests_grace_s=0.2)


class Restarting:
    """A service that can be restarted on the same port and with the same state folder."""

    def __init__(self, folder: Path, environ: Mapping[str, str] = MappingProxyType({})) -> None:
        self._folder = folder
        self.environ = dict(environ)
        config = {"pools": {"default": {**SMALL_POOL, "slots_per_sandbox": 2, "max_sandboxes": 1, "on_shutdown": "keep"}}}
        (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.service = self._start()

    def again(self, how: signal.Signals) -> None:
        """End the service with a signal, and start it again."""
        self.end(how)
        self.service = self._start()

    def end(self, how: signal.Signals) -> None:
        """End the service with a signal."""
        self.service.process.send_signal(how)
        self.service.process.wait(30)

    def _start(self) -> Service:
        state_dir, log_path = self._folder / "state", self._folder / "log"
        variables = {"SANDBOX_CONFIG": str(self._folder / "config.yaml"), "SANDBOX_STATE_DIR": str(state_dir)}
        environ = clean_environ({**variables, **QUICK_STOP.environ(), **self.environ})
        read_end, write_end = os.pipe()
        with log_path.open("ab") as log, open(read_end, "rb") as ready:
            process = start_serve(["--host", "127.0.0.1", "--port", str(self._port)], environ, log, write_end)
            os.close(write_end)
            service = Service(url="", state_dir=state_dir, process=process, log_path=log_path)
            service.url = listening_url(service, ready)
        wait_until_ready(service)
        return service


@contextmanager
def restarting_service() -> Iterator[Restarting]:
    """Start a service that can be restarted; at the end of the block, end it and its sandboxes."""
    with short_folder() as folder:
        made = Restarting(folder)
        try:
            yield made
        finally:
            made.end(signal.SIGKILL)
            end_sandboxes_left(made.service.state_dir)


@pytest.fixture(scope="module")
def restarting() -> Iterator[Restarting]:
    """A service that each test restarts."""
    with restarting_service() as made:
        yield made


def test_a_session_and_its_running_call_outlive_their_service(restarting: Restarting) -> None:
    begun = threading.Event()

    def run(lease: Lease) -> Result:
        for item in lease.exec_events("bash_stateful", {"command": f"{COMMAND}; echo $x"}):
            begun.set()
            if isinstance(item, Result):
                return item
        raise AssertionError("there was no result")

    with SandboxClient(restarting.service.url, restarting.service.token) as client, client.lease() as lease, ThreadPoolExecutor(1) as pool:
        assert lease.bash_stateful("x=5").success
        running = pool.submit(run, lease)
        assert begun.wait(30)
        restarting.again(signal.SIGKILL)
        lease.put_file("go", b"")
        result = running.result(60)
        assert (result.reason, result.metadata["session"], result.output) == ("exit", "kept", "begun\ndone\n\N{REPLACEMENT CHARACTER}5\n")
        assert lease.bash_stateful("echo $x; wc -l < ran").output == "5\n1\n"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_calls_outlive_their_service(restarting: Restarting, how: signal.Signals) -> None:
    service, begun = restarting.service, {encoding: threading.Event() for encoding in WHOLE}
    with SandboxClient(service.url, service.token) as client, client.gang(len(WHOLE), wait_s=30) as gang, ThreadPoolExecutor(2 * len(WHOLE)) as threads:
        leases = dict(zip(WHOLE, gang, strict=True))

        def follow(encoding: str) -> list[Output | Result]:
            items = []
            for item in leases[encoding].exec_events("bash", {"command": COMMAND}, encoding=encoding, call_id="followed"):
                items.append(item)
                begun[encoding].set()
            return items

        following = {encoding: threads.submit(follow, encoding) for encoding in WHOLE}
        assert all(event.wait(30) for event in begun.values())
        asking = {
            encoding: threads.submit(lease.exec, "bash", {"command": COMMAND}, encoding=encoding, call_id="followed") for encoding, lease in leases.items()
        }
        restarting.again(how)
        for lease in leases.values():
            lease.put_file("go", b"")
        streams = {encoding: one.result(60) for encoding, one in following.items()}
        results = {encoding: one.result(60) for encoding, one in asking.items()}
        ran = [lease.get_file("ran") for lease in leases.values()]

    assert ran == [b"ran\n"] * len(WHOLE)
    for encoding, whole in WHOLE.items():
        *pieces, last = streams[encoding]
        assert isinstance(last, Result)
        assert (last.success, last.reason) == (True, "exit")
        assert b"".join(piece.data for piece in pieces if isinstance(piece, Output)) == whole
        assert (results[encoding].success, results[encoding].raw_output()) == (True, whole)


async def test_the_slots_of_an_environment_outlive_their_service(restarting: Restarting) -> None:
    service = restarting.service
    async with RemoteToolBackend(service.url, service.token, acquire_timeout_s=30) as backend:
        slot = await backend.acquire("t-1")
        calls: list[tuple[Any, str, dict[str, Any]]] = [(slot, "bash", {"command": COMMAND}), (slot, "bash", {"command": "echo after"})]
        running = asyncio.create_task(backend.execute_batch(calls))
        async with asyncio.timeout(30):
            while "ran" not in [entry.path.rpartition("/")[2] for entry in await backend.list_artifacts(slot)]:
                await asyncio.sleep(0.02)  # no event reports that a command has written a file
        await asyncio.to_thread(restarting.again, signal.SIGTERM)
        await slot.lease.put_file("go", b"")
        async with asyncio.timeout(60):
            first, second = await running
        ran = await backend.read_artifact(slot, "ran")

    assert (first.success, second.output, ran) == (True, "after\n", b"ran\n")


def test_read_only_entries_outlive_a_service_that_is_killed_while_they_are_made(restarting: Restarting) -> None:
    service = restarting.service
    with SandboxClient(service.url, service.token) as client, client.lease(wait_s=30) as lease, ThreadPoolExecutor(1) as thread:
        assert lease.bash("mkdir tests more; echo kept > tests/a").success
        assert lease.narrow(read_only=["tests"]).read_only == ["tests"]
        narrowing = thread.submit(lease.narrow, read_only=["more"])
        restarting.again(signal.SIGKILL)
        narrowed = narrowing.result(60)
        tried = lease.bash("touch more/x || mv tests t || echo forged > tests/a || cat tests/a")

        assert list(narrowed.read_only) == list(client.lease_info(lease.lease_id).read_only) == ["tests", "more"]
        assert tried.output.splitlines()[-1] == "kept"

"""The service and its agents over each transport: a real service, the local backend told to use it, and the same promises."""

from __future__ import annotations

import json
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from env_client import Output, Result, SandboxClient
from tests.faults import links
from tests.integration.client.test_restarts import COMMAND, Restarting
from tests.support.service import TRANSPORT_VARIABLE, end_sandboxes_left, short_folder

OUTPUT_BYTES = 20 << 20
FILE = os.urandom(1 << 20) * 6
WITHIN_S = 30

TRANSPORTS = ("unix", "tls", "stdio")


@pytest.fixture(scope="module", params=TRANSPORTS)
def living(request: pytest.FixtureRequest) -> Iterator[Restarting]:
    """A service whose agents are reached by one transport after the other. It may be killed and started again."""
    with short_folder() as folder:
        made = Restarting(folder, {TRANSPORT_VARIABLE: request.param})
        try:
            yield made
        finally:
            made.end(signal.SIGKILL)
            end_sandboxes_left(made.service.state_dir)


@pytest.fixture
def client(living: Restarting) -> Iterator[SandboxClient]:
    with SandboxClient(living.service.url, living.service.token) as client:
        yield client


def handles(living: Restarting) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in living.service.state_dir.glob("sandboxes/*/handle.json")]


def relays(living: Restarting) -> list[psutil.Process]:
    return [child for child in psutil.Process(living.service.process.pid).children() if "connect" in child.cmdline()]


def test_the_agent_is_reached_by_the_transport_that_was_asked_for(living: Restarting) -> None:
    transport = living.environ[TRANSPORT_VARIABLE]
    (handle,) = handles(living)

    assert handle["address"].startswith(f"{transport}:")
    assert (handle["certificate"] is not None) == (transport == "tls")
    assert len(relays(living)) == (1 if transport == "stdio" else 0)
    kept = b"".join(path.read_bytes() for path in living.service.state_dir.rglob("*") if path.is_file())
    assert b"PRIVATE KEY" not in kept


def test_calls_outputs_and_files_of_any_size_come_through(client: SandboxClient) -> None:
    with client.lease(wait_s=WITHIN_S) as lease:
        result = lease.exec("bash", {"command": f"head -c {OUTPUT_BYTES} /dev/zero | tr '\\0' x; exit 3"}, call_id="big", timeout_s=60)
        whole = sum(len(piece) for piece in lease.call_output("big"))
        lease.put_file("f", FILE)
        digest = lease.bash("sha256sum < f; stat -c %s f")
        back = lease.get_file("f")
        with ThreadPoolExecutor(8) as threads:
            many = list(threads.map(lambda number: lease.bash(f"echo {number}").output, range(24)))

    assert (result.exit_code, whole) == (3, OUTPUT_BYTES)
    assert digest.output.endswith(f"{len(FILE)}\n")
    assert back == FILE
    assert many == [f"{number}\n" for number in range(24)]


@pytest.mark.skipif(links.permission_problem() is not None, reason=str(links.permission_problem()))
def test_a_call_outlives_a_link_that_is_cut(living: Restarting, client: SandboxClient) -> None:
    with client.lease(wait_s=WITHIN_S) as lease, ThreadPoolExecutor(1) as threads:
        running = threads.submit(lease.bash, COMMAND)
        wait_for_file(lease, "ran")
        before = relays(living)
        assert links.cut(living.service.process.pid, 1.0, living.service.state_dir) == 1
        lease.put_file("go", b"")
        result = running.result(WITHIN_S)
        ran = lease.get_file("ran")

    assert (result.success, ran) == (True, b"ran\n")
    assert not [relay for relay in before if relay.is_running() and relay.status() != psutil.STATUS_ZOMBIE]
    assert len(relays(living)) == len(before)


def wait_for_file(lease: Any, name: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while name not in lease.bash("ls").output.split():
        assert time.monotonic() < deadline, f"{name} was not written"
        time.sleep(0.02)  # what a command writes has no event


def test_a_killed_service_leaves_an_agent_that_the_next_one_adopts(living: Restarting, client: SandboxClient) -> None:
    """Even one that is told to make its own agents with another transport: how an agent is reached is on record with it."""
    begun = threading.Event()
    old_relays = [os.pidfd_open(relay.pid) for relay in relays(living)]
    (before,) = handles(living)
    with client.lease(wait_s=WITHIN_S) as lease, ThreadPoolExecutor(1) as threads:

        def follow() -> list[Output | Result]:
            items = []
            for item in lease.exec_events("bash", {"command": COMMAND}):
                items.append(item)
                begun.set()
            return items

        following = threads.submit(follow)
        assert begun.wait(WITHIN_S)
        living.environ[TRANSPORT_VARIABLE] = "unix"
        living.again(signal.SIGKILL)
        for relay in old_relays:
            assert select.select([relay], [], [], WITHIN_S)[0], "a relay has outlived its service"
            os.close(relay)
        lease.put_file("go", b"")
        *_, last = following.result(60)
        ran = lease.get_file("ran")

    assert isinstance(last, Result)
    assert (last.success, ran) == (True, b"ran\n")
    assert handles(living) == [before]
    assert Path(f"/proc/{before['data']['pid']}").exists()

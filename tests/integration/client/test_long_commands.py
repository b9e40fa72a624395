"""A command that runs for long, while everything between it and its clients breaks again and again: its output is complete, in order, and there once."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from env_client import Output, Result, RetryPolicy, SandboxClient
from tests.faults import links
from tests.integration.client.test_restarts import Restarting, restarting_service
from tests.support.cutting_proxy import CuttingProxy

WITHIN_S = 60
HOUR_S = 3600
#: Writes numbered lines, a few at a time, until there is a file `enough`.
LINES = "echo ran >> ran; n=0; until [ -e enough ]; do for _ in 1 2 3 4 5 6 7; do n=$((n+1)); echo line $n; done; sleep 0.01; done"
QUICK = RetryPolicy(base_s=0.01, cap_s=0.2)
CUTS = [0, 300, 700, 0, 2000, 150, 5000, 20_000] * 4


@pytest.fixture(scope="module")
def restarting() -> Iterator[Restarting]:
    with restarting_service() as made:
        yield made


class Progress:
    """How many bytes of an output a follower has, for a test that waits until it has more."""

    def __init__(self) -> None:
        self._bytes = 0
        self._grown = threading.Condition()

    def add(self, count: int) -> None:
        with self._grown:
            self._bytes += count
            self._grown.notify_all()

    def wait_for_more(self) -> None:
        """Wait until a further kilobyte has come."""
        with self._grown:
            wanted = self._bytes + 1000
            assert self._grown.wait_for(lambda: self._bytes >= wanted, WITHIN_S), f"no output came after {self._bytes} bytes"


def follow_with_client(client: SandboxClient, lease_id: str, progress: Progress) -> tuple[bytes, dict[str, Any]]:
    pieces, last = [], None
    for item in client.exec_events(lease_id, "bash", {"command": LINES}, call_id="long", timeout_s=HOUR_S):
        if isinstance(item, Output):
            pieces.append(item.data)
            progress.add(len(item.data))
        else:
            last = item
    assert isinstance(last, Result)
    return b"".join(pieces), {"reason": last.reason, "exit_code": last.exit_code}


def follow_over_http(url: Callable[[], str], token: str, lease_id: str, progress: Progress) -> tuple[bytes, dict[str, Any]]:
    """Follow the events as a browser does: after each cut with the `id` of the last event that was complete."""
    pieces: list[str] = []
    last_id = "0"
    while True:
        try:
            headers = {"Authorization": f"Bearer {token}", "Last-Event-ID": last_id}
            with httpx.stream("GET", f"{url()}/v1/leases/{lease_id}/calls/long/events", headers=headers, timeout=10, trust_env=False) as response:
                event: dict[str, str] = {}
                for line in response.iter_lines() if response.status_code == 200 else ():
                    if line:
                        name, _, value = line.partition(": ")
                        event[name] = value
                        continue
                    if event.get("event") == "output":
                        last_id = event["id"]
                        pieces.append(json.loads(event["data"])["data"])
                        progress.add(len(pieces[-1]))
                    elif event.get("event") == "result":
                        result = json.loads(event["data"])
                        if result["reason"] == "exit":
                            return "".join(pieces).encode(), {name: result[name] for name in ("reason", "exit_code")}
                    event = {}
        except httpx.TransportError:
            time.sleep(0.02)  # cut, or the service is not there now, of which there is no event


@pytest.mark.skipif(links.permission_problem() is not None, reason=str(links.permission_problem()))
def test_an_hours_command_outlives_cut_connections_cut_links_and_killed_services(restarting: Restarting) -> None:
    service = restarting.service
    with (
        CuttingProxy(service.url, list(CUTS)).running() as proxy,
        SandboxClient(service.url, service.token, retry=QUICK) as direct,
        SandboxClient(proxy.url, service.token, retry=QUICK) as cut,
        direct.lease(wait_s=30, ttl_s=HOUR_S) as lease,
        ThreadPoolExecutor(3) as threads,
    ):
        streamed, browsed = Progress(), Progress()
        following = [threads.submit(follow_with_client, cut, lease.lease_id, streamed)]
        streamed.wait_for_more()
        following.append(threads.submit(follow_over_http, lambda: proxy.url, service.token, lease.lease_id, browsed))
        asking = threads.submit(cut.exec, lease.lease_id, "bash", {"command": LINES}, call_id="long", timeout_s=HOUR_S)
        for disturb in ("kill", "link", "kill", "link"):
            browsed.wait_for_more()
            streamed.wait_for_more()
            if disturb == "kill":
                restarting.again(signal.SIGKILL)
            else:
                assert links.cut(restarting.service.process.pid, 0.2, restarting.service.state_dir) >= 1
        browsed.wait_for_more()
        streamed.wait_for_more()
        lease.put_file("enough", b"")
        streams = [each.result(WITHIN_S) for each in following]
        result = asking.result(WITHIN_S)
        whole = b"".join(lease.call_output("long"))
        ran = lease.get_file("ran")

    numbers = whole.decode().splitlines()
    assert numbers == [f"line {number}" for number in range(1, len(numbers) + 1)]
    assert [output == whole for output, _ in streams] == [True, True]
    assert [how for _, how in streams] == [{"reason": "exit", "exit_code": 0}] * 2
    assert (result.reason, result.exit_code, result.output_bytes, ran) == ("exit", 0, len(whole), b"ran\n")
    assert proxy.cut_count >= 8

"""A proxy that cuts connections in between loses nothing and repeats nothing."""

from __future__ import annotations

import asyncio

import pytest

from env_client import AsyncSandboxClient, RetryPolicy, SandboxClient
from tests.support.both_clients import KINDS, Face
from tests.support.cutting_proxy import CuttingProxy
from tests.support.service import Service

QUICK = RetryPolicy(base_s=0.001)


@pytest.mark.parametrize("kind", KINDS)
def test_every_call_runs_once_and_every_result_arrives(service: Service, kind: str) -> None:
    cuts = [None, 0, 10, 0, 300, 0, 500, 0, 700, 5, 900, 0]
    with asyncio.Runner() as runner, CuttingProxy(service.url, cuts).running() as proxy:
        made = SandboxClient if kind == "sync" else AsyncSandboxClient
        client = Face(made(proxy.url, service.token, retry=QUICK), runner)
        with client.gang(2, wait_s=30, run_id="cut") as leases:
            connections = Face(client.inner._sender.transport, runner)
            connections.close() if kind == "sync" else connections.aclose()  # the one that was let live
            for number in range(5):
                calls = [lease.call("bash", {"command": f"echo {number}.{part} >> ran; echo done {number}"}) for lease in leases for part in range(3)]
                results = client.exec_batch(calls) if number % 2 else [result for _, result in sorted(client.exec_stream(calls), key=lambda took: took[0])]
                assert [(result.call_id, result.output) for result in results] == [(call.call_id, f"done {number}\n") for call in calls]
            ran = [lease.get_file("ran").decode().split() for lease in leases]
            assert ran == [[f"{number}.{part}" for number in range(5) for part in range(3)]] * 2
        client.close() if kind == "sync" else client.aclose()

    assert proxy.cut_count >= 5

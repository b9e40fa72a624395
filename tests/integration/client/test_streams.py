"""Tests of both clients with a real service and a proxy that cuts connections: nothing is lost or repeated, and no call runs twice."""

from __future__ import annotations

import asyncio
import hashlib

import pytest

from env_client import AsyncSandboxClient, Event, Output, Result
from tests.support.both_clients import KINDS, QUICK, client_of
from tests.support.cutting_proxy import CuttingProxy
from tests.support.service import Service

NUMBERS = "for n in $(seq 1 2000); do echo number $n; done; echo ran >> ran"
NOISE = "python3 -c 'import random, sys; r = random.Random(7); sys.stdout.buffer.write(r.randbytes(3_000_000))'"


def told(items: list[Output | Result]) -> tuple[bytes, Result]:
    *pieces, last = items
    assert isinstance(last, Result)
    assert all(isinstance(piece, Output) for piece in pieces)
    return b"".join(piece.data for piece in pieces if isinstance(piece, Output)), last


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_followed_over_cuts(service: Service, kind: str) -> None:
    with client_of(kind, service.url, service.token) as direct, direct.lease(wait_s=30) as lease:
        with CuttingProxy(service.url, [0, 150, 700, 3000, 0, 2000, 9000]).running() as proxy, client_of(kind, proxy.url, service.token) as client:
            output, result = told(client.exec_events(lease.lease_id, "bash", {"command": NUMBERS}))
        ran = lease.get_file("ran")

    assert output.decode().splitlines() == [f"number {n}" for n in range(1, 2001)]
    assert (result.exit_code, ran) == (0, b"ran\n")
    assert proxy.cut_count >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_output_is_had_over_cuts(service: Service, kind: str) -> None:
    with client_of(kind, service.url, service.token) as direct, direct.lease(wait_s=30) as lease:
        result = lease.exec("bash", {"command": NOISE}, call_id="c-noise", encoding="base64", output_limit_bytes=1000)
        whole = b"".join(lease.call_output("c-noise"))
        with CuttingProxy(service.url, [0, 100_000, 700_000, 300]).running() as proxy, client_of(kind, proxy.url, service.token) as client:
            over_cuts = b"".join(client.call_output(lease.lease_id, "c-noise"))
        status = lease.call_status("c-noise")

    assert result.truncated
    assert len(whole) == 3_000_000
    assert hashlib.sha256(over_cuts).digest() == hashlib.sha256(whole).digest()
    assert (status.state, status.result.call_id) == ("done", "c-noise")


@pytest.mark.parametrize("kind", KINDS)
def test_exact_bytes_are_followed(service: Service, kind: str) -> None:
    with client_of(kind, service.url, service.token) as client, client.lease(wait_s=30) as lease:
        output, result = told(client.exec_events(lease.lease_id, "bash", {"command": NOISE}, encoding="base64", output_limit_bytes=0))
        whole = b"".join(lease.call_output(result.call_id))

    assert output == whole
    assert len(output) == result.output_bytes == 3_000_000


def test_events_are_received_across_cut_connections(service: Service) -> None:
    with CuttingProxy(service.url, [400, 400, 400]).running() as proxy:
        asyncio.run(_follow(service, proxy.url))
    assert proxy.cut_count >= 1


async def _follow(service: Service, url: str) -> None:
    """Acquire and release two leases while another client reads the events from the oldest one on."""
    seen: list[Event] = []
    async with AsyncSandboxClient(url, service.token, retry=QUICK) as watching, AsyncSandboxClient(service.url, service.token) as client:
        mine = [(await client.acquire(run_id="r-watched", wait_s=30)).leases[0].lease_id]

        async def watch() -> None:
            async for event in watching.events(after="0"):
                if event.data.get("lease_id") in mine:
                    seen.append(event)
                if [one.kind for one in seen].count("lease.released") == 2:
                    return

        watcher = asyncio.create_task(watch())
        await client.release(mine)
        mine += [(await client.acquire(run_id="r-watched", wait_s=30)).leases[0].lease_id]
        await client.release(mine)
        async with asyncio.timeout(30):
            await watcher

    assert [(event.kind, event.data["lease_id"]) for event in seen] == [(kind, one) for one in mine for kind in ("lease.acquired", "lease.released")]
    assert sorted({event.id for event in seen}, key=int) == [event.id for event in seen]
    assert all(event.at > 0 for event in seen)

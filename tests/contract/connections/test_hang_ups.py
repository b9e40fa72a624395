"""Callers that go away: while queued, while sending, while reading. Nothing is lost, nothing is held, nobody else notices."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from sandbox_server.api.tenants import Tenant
from tests.support.service_harness import ALICE, ServiceHarness, bash


class Caller:
    """A caller who can let go of the line at any moment."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def of(cls, harness: ServiceHarness) -> Caller:
        host, _, port = harness.url.removeprefix("http://").partition(":")
        return cls(*await asyncio.open_connection(host, int(port)))

    async def send(self, method: str, path: str, body: bytes, *headers: str, length: int | None = None, tenant: Tenant = ALICE) -> None:
        lines = [f"{method} {path} HTTP/1.1", "Host: harness", f"Authorization: Bearer {tenant.token}", *headers]
        if not any(header.lower().startswith("transfer-encoding") for header in headers):
            lines.append(f"Content-Length: {len(body) if length is None else length}")
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        await self.writer.drain()

    async def hang_up(self) -> None:
        self.writer.transport.abort()

    async def status(self) -> int:
        return int((await self.reader.readuntil(b"\r\n")).split()[1])


async def until(harness: ServiceHarness, **wanted: Any) -> None:
    """Ask the pool again and again until it looks as wanted."""
    for _ in range(500):
        view = (await harness.http.get("/v1/pools/default")).json()
        if all({**view, **view["slots"]}[name] == value for name, value in wanted.items()):
            return
    raise AssertionError(f"{view} and not {wanted}")


async def test_hanging_up_while_queued_leaves_the_queue(port: ServiceHarness) -> None:
    leases = await port.acquire(4)
    caller = await Caller.of(port)
    await caller.send("POST", "/v1/acquire", b"{}")
    await until(port, queue=1)

    await caller.hang_up()

    await until(port, queue=0)
    await port.http.post("/v1/release", json={"lease_ids": leases})
    await until(port, ready=4, leased=0)


async def test_hanging_up_while_sending_changes_nothing(port: ServiceHarness) -> None:
    caller = await Caller.of(port)
    await caller.send("POST", "/v1/acquire", b'{"count": 2', length=1000)

    await caller.hang_up()

    await until(port, ready=4, leased=0)
    assert len(await port.acquire(4)) == 4


async def test_hanging_up_in_the_middle_of_a_file_leaves_no_half_of_it(port: ServiceHarness) -> None:
    (lease_id,) = await port.acquire()
    caller = await Caller.of(port)
    await caller.send("PUT", f"/v1/leases/{lease_id}/files?path=half", b"x" * 100_000, length=200_000)

    await caller.hang_up()

    await until(port, leased=1)
    assert (await port.http.get(f"/v1/leases/{lease_id}/files", params={"path": "half"})).status_code == 404


async def test_hanging_up_while_reading_ends_no_call(port: ServiceHarness) -> None:
    (lease_id,) = await port.acquire()
    calls = [bash(lease_id, "hang", call_id="first"), *(bash(lease_id, f"echo {n}") for n in range(5))]
    caller = await Caller.of(port)
    await caller.send("POST", "/v1/exec-batch", json.dumps({"calls": calls}).encode(), "Accept: application/x-ndjson")
    await caller.status()
    while not port.agent.ran:
        await asyncio.sleep(0)

    await caller.hang_up()
    await port.http.post("/v1/cancel", json={"lease_id": lease_id, "call_id": "first"})

    for _ in range(500):
        if len(port.agent.ran) == 6:
            break
        await port.http.get("/healthz")
    assert [command for _, command in port.agent.ran] == ["hang", *(f"echo {n}" for n in range(5))]


async def test_a_body_that_claims_too_much_is_refused_before_it_is_sent(port: ServiceHarness) -> None:
    caller = await Caller.of(port)
    await caller.send("POST", "/v1/exec-batch", b"", length=10**12)

    assert await caller.status() == 413
    await caller.hang_up()
    await until(port, ready=4)


async def test_a_body_that_says_no_length_is_counted(port: ServiceHarness) -> None:
    caller = await Caller.of(port)
    chunk = b"%x\r\n%s\r\n" % (1 << 20, b" " * (1 << 20))
    await caller.send("POST", "/v1/exec-batch", chunk, "Transfer-Encoding: chunked")
    status = asyncio.create_task(caller.status())
    while not status.done():
        caller.writer.write(chunk)
        await caller.writer.drain()

    assert await status == 413
    await caller.hang_up()


async def test_a_caller_that_waits_for_leave_to_send_gets_it(port: ServiceHarness) -> None:
    caller = await Caller.of(port)
    await caller.send("POST", "/v1/acquire", b"", "Expect: 100-continue", length=2)
    assert await caller.status() == 100
    await caller.reader.readuntil(b"\r\n")

    caller.writer.write(b"{}")

    assert await caller.status() == 200
    await caller.hang_up()

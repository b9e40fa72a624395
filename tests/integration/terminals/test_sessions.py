"""Terminals outlive connections: several viewers, one writer, reconnects, restarts of the service."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Mapping
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.frames import Close

from tests.integration.client.test_restarts import restarting_service
from tests.integration.terminals.conftest import TerminalHarness
from tests.support.terminal_client import open_terminal

#: Opens pseudo-terminals until it gets no more, and keeps them.
HOARDER = """
import os, time
taken = []
while True:
    try:
        taken.append(os.openpty())
    except OSError:
        break
print("took", len(taken), flush=True)
time.sleep(1000)
"""


def is_writer(report: Mapping[str, Any]) -> bool:
    return report["type"] == "writer" and report["writer"] is True


def is_no_writer(report: Mapping[str, Any]) -> bool:
    return report["type"] == "writer" and report["writer"] is False


async def test_one_writes_and_others_watch(bwrap: TerminalHarness, lease: str) -> None:
    async with (
        bwrap.terminal(lease, session="main") as writer,
        bwrap.terminal(lease, mode="watch") as unnamed,
        bwrap.terminal(lease, mode="watch", session="main") as named,
    ):
        await writer.run("echo the first line")
        for watcher in (unnamed, named):
            assert watcher.reports[0] == {"type": "session", "session": "main", "new": False, "writer": False, "cols": 80, "rows": 24}
            await watcher.until(b"the first line\r\n")
        await writer.send(type="resize", cols=120, rows=40)
        await unnamed.until_report(lambda report: report == {"type": "resize", "cols": 120, "rows": 40})
        await named.type("typed by a watcher\n")
        code, reason = await named.closed()
        assert (code, reason) == (1008, "this connection only watches; open one with mode=write to type")
        await writer.type("exit 5\n")

        assert await writer.exit_code() == await unnamed.exit_code() == 5
    assert b"typed by" not in writer.output
    assert not any(report["type"] == "resize" for report in writer.reports)


async def test_a_second_writer_takes_over_and_the_first_can_take_back(bwrap: TerminalHarness, lease: str) -> None:
    async with bwrap.terminal(lease, session="main") as first, bwrap.terminal(lease, session="main", cols=100, rows=50) as second:
        assert second.reports[0]["writer"] is True
        await first.until_report(is_no_writer)
        await first.until_report(lambda report: report == {"type": "resize", "cols": 100, "rows": 50})
        await first.type("exit 1\n")  # it is dropped
        assert await second.run("stty size") == "50 100\n"
        await first.send(type="writer")
        await first.until_report(is_writer)
        await second.until_report(is_no_writer)
        await first.type("exit 6\n")

        assert await first.exit_code() == await second.exit_code() == 6


async def test_a_reconnect_shows_what_came_before_and_meanwhile(bwrap: TerminalHarness, lease: str) -> None:
    async with bwrap.terminal(lease) as first:
        await first.run("name=kept")
        await first.type("until [ -e go ]; do sleep 0.05; done; echo mean''while\n")
        await first.until(b"\x1b[?2004l")
        first.websocket.transport.abort()
    bwrap.bash(lease, "touch go")
    async with bwrap.terminal(lease, session=first.session) as second:
        assert second.reports[0]["new"] is False
        shown = await second.until(b"meanwhile\r\n")
        assert b"name=kept" in shown

        assert await second.run("echo $name") == "kept\n"


async def test_the_exit_code_waits_for_the_one_who_was_away(bwrap: TerminalHarness, lease: str) -> None:
    async with bwrap.terminal(lease, session="main") as first:
        await first.type("until [ -e go ]; do sleep 0.05; done; echo $$ > ended; exit 9\n")
        await first.until(b"\x1b[?2004l")
    bwrap.bash(lease, "touch go; until [ -s ended ] && ! [ -e /proc/$(cat ended) ]; do sleep 0.05; done")
    async with bwrap.terminal(lease, session="main") as second:
        assert await second.exit_code() == 9
    async with bwrap.terminal(lease, session="main") as third:
        assert third.reports[0]["new"] is True
        await third.run("true")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_a_terminal_survives_a_restart_of_the_service(how: signal.Signals) -> None:
    with restarting_service() as restarting:
        service = restarting.service
        with service.http() as http:
            lease = http.post("/v1/acquire", json={}).raise_for_status().json()["leases"][0]["lease_id"]
        async with open_terminal(service.url, service.token, lease, session="main") as before:
            await before.run("name=kept")
            await asyncio.to_thread(restarting.end, how)
            assert (await before.closed())[0] == {signal.SIGTERM: 1012, signal.SIGKILL: 1006}[how]
        await asyncio.to_thread(restarting.again, signal.SIGKILL)
        async with open_terminal(service.url, service.token, lease, session="main") as after:
            assert after.reports[0]["new"] is False
            assert await after.run("echo $name") == "kept\n"


async def test_narrowing_ends_terminals_and_a_new_one_can_be_opened(bwrap: TerminalHarness, lease: str) -> None:
    async with bwrap.terminal(lease, session="main") as terminal:
        await terminal.run("true")
        bwrap.http.post(f"/v1/leases/{lease}/narrow", json={"allow_network": False}).raise_for_status()
        code, reason = await terminal.closed()
    assert code == 4503
    assert "rights" in reason
    async with bwrap.terminal(lease, session="main") as terminal:
        assert terminal.reports[0]["new"] is True
        await terminal.run("true")


async def refusal(harness: TerminalHarness, lease: str, **fields: Any) -> dict[str, Any]:
    """The problem document with which a handshake is refused."""
    with pytest.raises(InvalidStatus) as refused:
        async with harness.terminal(lease, **fields):
            pass
    document: dict[str, Any] = json.loads(refused.value.response.body)
    return document


async def test_a_lease_has_so_many_terminals_and_a_terminal_so_many_viewers(bwrap: TerminalHarness, lease: str) -> None:
    for number in range(16):
        async with bwrap.terminal(lease, session=f"s{number}"):
            pass
    document = await refusal(bwrap, lease)
    assert (document["code"], document["detail"]) == ("quota_exceeded", "the lease has 16 terminals: at most so many are allowed; end one of them")

    watchers = [bwrap.terminal(lease, session="s0", mode="watch") for _ in range(16)]
    await asyncio.gather(*(watcher.__aenter__() for watcher in watchers))
    document = await refusal(bwrap, lease, session="s0", mode="watch")
    assert (document["code"], document["detail"]) == ("quota_exceeded", "the terminal 's0' has 16 viewers: at most so many are allowed")
    await asyncio.gather(*(watcher.__aexit__(None, None, None) for watcher in watchers))


async def test_a_slot_that_takes_all_its_pseudo_terminals_harms_itself_alone(bwrap: TerminalHarness, lease: str) -> None:
    bwrap.http.put(f"/v1/leases/{lease}/files", params={"path": "hoarder.py"}, content=HOARDER).raise_for_status()
    bwrap.bash(lease, "/usr/bin/python3 hoarder.py > taken & until [ -s taken ]; do sleep 0.05; done")
    assert bwrap.bash(lease, "cat taken") == "took 64\n"
    document = await refusal(bwrap, lease)
    assert (document["code"], "the terminal could not be opened" in document["detail"]) == ("backend_unavailable", True)

    other = bwrap.acquire()
    async with bwrap.terminal(other) as terminal:
        assert await terminal.run("echo works") == "works\n"
    bwrap.release(other)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"cols": 0}, "cols"),
        ({"rows": 1001}, "rows"),
        ({"cols": "٣"}, "cols"),
        ({"session": "a/b"}, "session"),
        ({"session": "x" * 65}, "session"),
        ({"mode": "read"}, "mode"),
        ({"colour": 1}, "colour"),
        ({"mode": "watch", "session": "nowhere"}, "session"),
    ],
)
async def test_a_wrong_query_is_refused_with_the_name_of_its_field(bwrap: TerminalHarness, lease: str, fields: dict[str, Any], field: str) -> None:
    document = await refusal(bwrap, lease, **fields)

    assert (document["code"], document["status"], document["field"]) == ("invalid_request", 422, field)
    assert field in document["detail"]


@pytest.mark.parametrize(
    ("frame", "code", "reason"),
    [
        ("no JSON", 1007, "a text frame must be a JSON object; send keys as binary frames"),
        ("[" * 50_000, 1007, "a text frame must be a JSON object; send keys as binary frames"),
        ("[]", 1007, 'a text frame must be a JSON object whose type is "resize" or "writer"'),
        ('{"type": ["resize"]}', 1007, 'a text frame must be a JSON object whose type is "resize" or "writer"'),
        ('{"type": "resize", "cols": true, "rows": 5}', 1007, "resize: cols must be a whole number from 1 to 1000"),
        ('{"type": "resize", "cols": 5, "rows": 1001}', 1007, "resize: rows must be a whole number from 1 to 1000"),
        ('{"type": "resize", "cols": 5}', 1007, "resize: rows must be a whole number from 1 to 1000"),
        (bytes(65_537), 1009, None),
    ],
)
async def test_a_wrong_frame_ends_its_connection_and_not_the_terminal(
    bwrap: TerminalHarness, lease: str, frame: str | bytes, code: int, reason: str | None
) -> None:
    async with bwrap.terminal(lease, session="main") as terminal:
        await terminal.websocket.send(frame)
        closed = await terminal.closed()
    assert closed[0] == code
    assert reason is None or closed[1] == reason
    async with bwrap.terminal(lease, session="main") as terminal:
        assert terminal.reports[0]["new"] is False


async def test_a_lease_of_nobody_closes_with_4404(bwrap: TerminalHarness) -> None:
    with pytest.raises(ConnectionClosedError) as closed:
        async with bwrap.terminal("l-nobody"):
            pass

    assert closed.value.rcvd == Close(4404, "there is no lease 'l-nobody', or it is not yours")

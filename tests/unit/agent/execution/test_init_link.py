"""The agent's end of a control socket when init ends."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from sandbox_server.agent.execution.init_client.init_link import InitLink
from sandbox_server.agent.init.reports import EXITED, READY, REPORT


class RecordingListener:
    """A listener that records what it is called with."""

    def __init__(self, story: list[str]) -> None:
        self._story = story

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        self._story.append(f"exited {status}")

    def on_process_refused(self, errno: int, step: str) -> None:
        self._story.append(f"refused {errno}")

    def on_init_lost(self, detail: str) -> None:
        self._story.append(f"lost: {detail}")


@pytest.fixture
async def ends() -> AsyncIterator[tuple[InitLink, socket.socket]]:
    """A link over which init has reported that it is ready, and init's end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = InitLink(asyncio.get_running_loop(), ours)
    theirs.send(REPORT.pack(READY, 0, 0, 0, 0))
    await link.wait_until_ready({}, 5.0)
    yield link, theirs
    link.close_link()
    theirs.close()


async def test_reports_can_be_processed_before_the_event_loop_does_so(ends: tuple[InitLink, socket.socket]) -> None:
    link, init = ends
    story: list[str] = []
    number = link.start_process({"op": "spawn"}, [], RecordingListener(story))
    init.send(REPORT.pack(EXITED, number, 0, 0, 0))

    link.poll_reports()

    assert story == ["exited 0"]


async def test_the_slot_gets_the_loss_of_init_before_the_listeners_of_processes(ends: tuple[InitLink, socket.socket]) -> None:
    link, init = ends
    story: list[str] = []
    link.on_lost = lambda detail: story.append("slot")
    link.start_process({"op": "spawn"}, [], RecordingListener(story))
    for _ in ("its configuration", "the request"):
        init.recv(4096)
    init.close()

    link.poll_reports()
    link.poll_reports()

    assert story == ["slot", "lost: init has ended"]


async def test_a_process_that_is_requested_on_a_closed_link_is_lost_in_the_next_turn_of_the_loop(ends: tuple[InitLink, socket.socket]) -> None:
    link, _ = ends
    story: list[str] = []
    link.close_link()
    link.start_process({"op": "spawn"}, [], RecordingListener(story))
    assert story == []

    await asyncio.sleep(0)

    assert story == ["lost: init had ended before"]

"""The agent's end of a control socket, when init goes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from sandbox_server.agent.execution.init_client.init_link import EXITED, READY, REPORT, InitLink


class Heard:
    """A listener that writes down what it hears."""

    def __init__(self, story: list[str]) -> None:
        self._story = story

    def exited(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        self._story.append(f"exited {status}")

    def refused(self, number: int, where: str) -> None:
        self._story.append(f"refused {number}")

    def init_lost(self, detail: str) -> None:
        self._story.append(f"lost: {detail}")


@pytest.fixture
async def ends() -> AsyncIterator[tuple[InitLink, socket.socket]]:
    """A link that init has greeted, and init's end of it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = InitLink(asyncio.get_running_loop(), ours)
    theirs.send(REPORT.pack(READY, 0, 0, 0, 0))
    await link.ready({}, 5.0)
    yield link, theirs
    link.close()
    theirs.close()


async def test_what_init_has_said_can_be_heard_before_the_loop_comes_to_it(ends: tuple[InitLink, socket.socket]) -> None:
    link, init = ends
    story: list[str] = []
    number = link.start({"op": "spawn"}, [], Heard(story))
    init.send(REPORT.pack(EXITED, number, 0, 0, 0))

    link.poll()

    assert story == ["exited 0"]


async def test_the_slot_hears_of_its_loss_before_its_runs_do(ends: tuple[InitLink, socket.socket]) -> None:
    link, init = ends
    story: list[str] = []
    link.on_lost = lambda detail: story.append("slot")
    link.start({"op": "spawn"}, [], Heard(story))
    for _ in ("its configuration", "the request"):
        init.recv(4096)
    init.close()

    link.poll()
    link.poll()

    assert story == ["slot", "lost: init has ended"]


async def test_a_run_that_is_asked_for_too_late_is_lost_and_does_not_wait_for_ever(ends: tuple[InitLink, socket.socket]) -> None:
    link, _ = ends
    story: list[str] = []
    link.close()
    link.start({"op": "spawn"}, [], Heard(story))
    assert story == []

    await asyncio.sleep(0)

    assert story == ["lost: init had ended before"]

"""The pace of a terminal is that of its writer, and nothing that a program or a viewer does takes memory without bound."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import psutil
from websockets.exceptions import InvalidStatus

from tests.integration.terminals.conftest import TerminalHarness
from tests.support.terminal_client import TerminalClient

#: A client that reads no further than the first frame: the library stops reading from its socket while one frame waits. So it does not read the answer
#: when it closes the connection, for which the library would wait for 10 s.
READS_NOTHING = {"max_queue": 1, "close_timeout": 0.1}
#: More than the buffers on the way hold: those of the slot's terminal, the agent, the link, the service, two sockets and the client.
MORE_THAN_BUFFERS_BYTES = 16 << 20
#: Those that write or watch.
CONNECTIONS_OF_A_TERMINAL = 16
#: Writes without end, and counts in a file what it has written.
FLOOD = b"""
import os
count = os.open("count", os.O_WRONLY | os.O_CREAT)
written = 0
while True:
    written += os.write(1, b"x" * 4095 + b"\\n")
    os.pwrite(count, b"%20d" % written, 0)
"""


def resident_bytes(harness: TerminalHarness) -> int:
    """The memory of the service and its agent."""
    service = psutil.Process(harness.service.process.pid)
    children = [child for child in service.children() if any("agent" in word for word in child.cmdline())]
    return sum(int(process.memory_info().rss) for process in (service, *children))


async def count_of(harness: TerminalHarness, lease: str) -> int:
    text = await asyncio.to_thread(harness.bash, lease, "cat count 2>/dev/null || echo 0")
    return int(text or 0)


async def wait_until_it_stands_still(harness: TerminalHarness, lease: str) -> int:
    """Wait until the flood has written nothing for a second. Returns how much it has written."""
    async with asyncio.timeout(50):
        last = -1
        while (count := await count_of(harness, lease)) != last or not count:
            last = count
            await asyncio.sleep(1)
    return count


@contextlib.asynccontextmanager
async def flooding(harness: TerminalHarness, lease: str) -> AsyncIterator[TerminalClient]:
    """A writer that reads nothing, whose program writes without end."""
    harness.http.put(f"/v1/leases/{lease}/files", params={"path": "flood.py"}, content=FLOOD).raise_for_status()
    async with harness.terminal(lease, READS_NOTHING, session="flood") as terminal:
        await terminal.type("/usr/bin/python3 flood.py\n")
        yield terminal
        terminal.websocket.transport.abort()


async def test_a_writer_that_does_not_read_stops_the_program(bwrap: TerminalHarness, lease: str) -> None:
    before_bytes = resident_bytes(bwrap)
    async with flooding(bwrap, lease) as terminal:
        written = await wait_until_it_stands_still(bwrap, lease)
        assert written < MORE_THAN_BUFFERS_BYTES
        assert resident_bytes(bwrap) < before_bytes + (16 << 20)
        read_bytes = 0
        while read_bytes <= written:
            await terminal.receive()
            read_bytes += len(terminal.output)
            terminal.output.clear()

        assert await count_of(bwrap, lease) > written


async def test_a_program_whose_writer_has_gone_runs_on(bwrap: TerminalHarness, lease: str) -> None:
    before_bytes = resident_bytes(bwrap)
    async with flooding(bwrap, lease):
        written = await wait_until_it_stands_still(bwrap, lease)
    async with asyncio.timeout(50):
        while await count_of(bwrap, lease) < written + (20 << 20):
            await asyncio.sleep(0.1)

    assert resident_bytes(bwrap) < before_bytes + (16 << 20)


async def test_a_watcher_that_does_not_read_neither_stops_the_program_nor_sees_all_of_it(bwrap: TerminalHarness, lease: str) -> None:
    async with bwrap.terminal(lease, session="main") as writer, bwrap.terminal(lease, READS_NOTHING, session="main", mode="watch") as watcher:
        await writer.type(f"head -c {MORE_THAN_BUFFERS_BYTES} /dev/zero | tr '\\0' x; echo all'' of it; exit\n")
        await writer.until(b"all of it\r\n")
        for cols in range(1, 1001):
            await writer.send(type="resize", cols=cols, rows=1001 - cols)
        assert await writer.exit_code() == 0
        assert await watcher.exit_code() == 0

    skipped = [report["bytes"] for report in watcher.reports if report["type"] == "skipped"]
    assert watcher.output.endswith(b"all of it\r\nexit\r\n")
    assert len(watcher.output) + sum(skipped) > MORE_THAN_BUFFERS_BYTES
    assert skipped


async def test_hundreds_of_resizes_are_all_done_and_few_are_reported(bwrap: TerminalHarness, lease: str) -> None:
    async with bwrap.terminal(lease, session="main") as writer, bwrap.terminal(lease, READS_NOTHING, session="main", mode="watch") as watcher:
        await writer.type("printf %s%s REA DY; head -n 1 >/dev/null\n")  # a shell would draw its prompt again each time
        await writer.until(b"READY")
        await asyncio.gather(*(writer.send(type="resize", cols=1 + number % 1000, rows=1 + number % 777) for number in range(500)))
        await writer.type("\n")
        assert await writer.run("stty size") == f"{1 + 499 % 777} {1 + 499 % 1000}\n"
        last: dict[str, Any] = {"type": "resize", "cols": 1 + 499 % 1000, "rows": 1 + 499 % 777}
        await watcher.until_report(lambda report: report == last)


async def test_keys_that_no_program_reads_take_no_memory(bwrap: TerminalHarness, lease: str) -> None:
    before_bytes = resident_bytes(bwrap)
    async with bwrap.terminal(lease, session="main") as terminal:
        await terminal.type("stty raw -echo; printf %s REA DY; sleep 1000\n")
        await terminal.until(b"READY")
        try:
            async with asyncio.timeout(3):
                for _ in range(MORE_THAN_BUFFERS_BYTES // 65_536):
                    await terminal.type(bytes(65_536))
            raise AssertionError("all keys were taken, although no program reads them")
        except TimeoutError:
            pass
        assert resident_bytes(bwrap) < before_bytes + (16 << 20)
        terminal.websocket.transport.abort()


async def test_a_writer_that_vanishes_while_its_keys_wait_makes_room_for_others(bwrap: TerminalHarness, lease: str) -> None:
    async with contextlib.AsyncExitStack() as viewers:
        terminal = await viewers.enter_async_context(bwrap.terminal(lease, session="main"))
        await terminal.type("stty raw -echo; printf %s%s REA DY; sleep 1000\n")
        await terminal.until(b"READY")
        for _ in range(CONNECTIONS_OF_A_TERMINAL - 1):
            await viewers.enter_async_context(bwrap.terminal(lease, session="main", mode="watch"))
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(1):
                    await terminal.type(bytes(65_536))
        with contextlib.suppress(InvalidStatus):
            await viewers.enter_async_context(bwrap.terminal(lease, session="main", mode="watch"))
            raise AssertionError("there was room for one more than the terminal may have")
        terminal.websocket.transport.abort()

        async with asyncio.timeout(30):
            while not await has_room(bwrap, lease):
                await asyncio.sleep(0.1)


async def has_room(harness: TerminalHarness, lease: str) -> bool:
    """Whether one more can watch the terminal."""
    try:
        async with harness.terminal(lease, session="main", mode="watch"):
            return True
    except InvalidStatus:
        return False

"""The agent's side of a template, whose answers the test writes: no init that a template has forked stays unknown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.isolation.forking.forked_init import ForkedInit
from sandbox_server.agent.isolation.forking.template_process import TemplateProcess
from sandbox_server.agent.template.messages import ANSWER, MESSAGE_BYTES


class WrittenTemplate:
    """A template process that does nothing, and its end of the socket."""

    def __init__(self) -> None:
        agent_end, self.sock = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.setblocking(False)
        self.process = TemplateProcess(subprocess.Popen(["sleep", "60"]), agent_end)
        self.last_number = 0

    async def receive(self) -> None:
        """Wait for a request."""
        await asyncio.get_running_loop().sock_recv(self.sock, MESSAGE_BYTES)
        self.last_number += 1

    def answer(self, pid: int) -> None:
        """Answer the last request, and let the agent read the answer in this turn of its event loop."""
        self.sock.send(ANSWER.pack(self.last_number, pid))
        self.process._read_answers()


@pytest.fixture
async def template() -> AsyncIterator[WrittenTemplate]:
    written = WrittenTemplate()
    yield written
    written.process.close_template()
    written.sock.close()


def start_init(folder: Path) -> int:
    """Start a child that has the name of an init."""
    program = folder / "slot-init"
    if not program.exists():
        program.symlink_to("/bin/sleep")
    return os.posix_spawn(program, ["slot-init", "60"], os.environ)


async def reaped(pid: int) -> bool:
    """Wait until a child was reaped."""
    async with asyncio.timeout(5):
        while os.path.exists(f"/proc/{pid}"):
            await asyncio.sleep(0.005)
    return True


async def test_an_init_whose_start_is_cancelled_while_its_answer_arrives_is_reaped(template: WrittenTemplate) -> None:
    asked = asyncio.create_task(template.process.fork_init(0, {}, ()))
    await template.receive()
    init = os.posix_spawnp("sleep", ["sleep", "60"], os.environ)
    template.answer(init)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        (await asked).kill()  # Some versions of Python prefer the answer.
        os.waitpid(init, 0)

    assert await reaped(init)


async def test_the_end_of_one_template_leaves_the_inits_of_another_one_alone(template: WrittenTemplate, tmp_path: Path) -> None:
    other = WrittenTemplate()
    lost, kept = (asyncio.create_task(asked.process.fork_init(0, {}, ())) for asked in (template, other))
    await asyncio.gather(template.receive(), other.receive())
    lost_pid, kept_pid = start_init(tmp_path), start_init(tmp_path)
    template.process.close_template()
    with pytest.raises(StartFailed):
        await lost
    assert os.path.exists(f"/proc/{lost_pid}")  # It could be the init that the other template is about to report.
    other.answer(kept_pid)
    init = await kept

    assert await reaped(lost_pid)
    assert (init.pid, init.poll()) == (kept_pid, None)
    init.kill()
    os.waitpid(kept_pid, 0)
    other.process.close_template()
    other.sock.close()


async def test_an_init_that_was_reaped_elsewhere_has_ended() -> None:
    init = ForkedInit(os.posix_spawnp("true", ["true"], os.environ))
    os.waitpid(init.pid, 0)

    assert init.poll() == -9
    init.kill()

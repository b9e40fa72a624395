"""The processes of a terminal: a tmux server in the slot, and its control-mode client, to which the agent sends commands.

The server stays in the foreground, and the client and the programs of the pane descend from it. So the processes of the terminal are one tree: whatever ends
the tree ends them all, and the timeout of another call never takes them for processes that that call has left behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import deque
from typing import Any, Callable, Deque, Sequence

from sandbox_server.agent.errors import InvalidArgs
from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.processes.slot_process import SlotProcess
from sandbox_server.agent.execution.processes.spawn_spec import program_spec
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.execution.tmux.availability import check_version
from sandbox_server.agent.execution.tmux.control_mode import ControlModeError, ControlModeParser, ShortReply
from sandbox_server.agent.execution.tmux.recording import TERM
from sandbox_server.agent.execution.tmux.screen import HISTORY_LINES

log = logging.getLogger(__name__)

REPLY_WITHIN_S = 20.0
_MAX_SOCKET_PATH_BYTES = 100  # the kernel allows 107
_READ_AGAIN_S = 60.0
_READ_REST_WITHIN_S = 1.0
_BUSY_FACTOR = 3  # for each second that the output of one terminal has taken, the agent leaves it alone for so many
_SHORT_WORK_S = 0.001
_MAX_TEXT_LINES = 20
_MAX_TEXT_CHARS = 300
_HELLO = b"terminal-version "
_OPTIONS = (
    "set -g history-limit %d" % HISTORY_LINES,
    "set -g default-terminal %s" % TERM,
    "set -s escape-time 0",
    "set -g status off",
    "set -g allow-rename off",
    "set -g remain-on-exit on",
    "set -gq remain-on-exit-format ''",
)
# Arguments: the folder of the socket, the columns, the rows, the shell. Its output and errors go to the agent, which knows the first line by its first word.
_SCRIPT = """
command -v tmux >/dev/null || {{ echo '{hello}'; exit; }}
echo "{hello}$(tmux -V)"
mkdir -m 700 "$1" || exit
exec 3<&0
(
    for ((i = 0; i < 500; i++)); do tmux -S "$1/s" -N start-server 2>/dev/null && break; sleep 0.02; done
    exec tmux -u -S "$1/s" -N -C {options} \\; new-session -x "$2" -y "$3" "exec '$4'" <&3 3<&-
) &
exec tmux -S "$1/s" -f /dev/null -D </dev/null >/dev/null 2>&1 3<&-
""".format(hello=_HELLO.decode(), options=" \\; ".join(_OPTIONS))


class TerminalEnded(Exception):
    """The processes of the terminal have ended, or were given up. The text says why."""


class TmuxProcess:
    """A tmux server with one session, and its control-mode client.

    Args:
        runtime: the slot runtime.
        drains: of the slot.
        tasks: runs the background tasks.
        on_output: called with what the programs of the pane have printed.
    """

    def __init__(self, runtime: SlotRuntime, drains: Drains, tasks: BackgroundTasks, on_output: Callable[[bytes], None]) -> None:
        self._tasks = tasks
        self._on_output = on_output
        self._loop = asyncio.get_event_loop()
        self._parser = ControlModeParser(self)
        self._process = SlotProcess(runtime, drains, (), self)
        self._version: asyncio.Future[str] = self._loop.create_future()
        self._attached: asyncio.Future[None] = self._loop.create_future()
        self._text: Deque[str] = deque(maxlen=_MAX_TEXT_LINES)
        self._reader: asyncio.Task[None] | None = None
        self._has_reader_begun = False
        self.ended = asyncio.Event()
        self._gone = asyncio.Event()
        self.end_reason = ""

    @property
    def runtime(self) -> SlotRuntime:
        """The slot runtime in which it runs."""
        return self._process.runtime

    async def start(self, width: int, height: int) -> None:
        """Start the processes, and wait until tmux answers.

        Raises:
            InvalidArgs: the slot has no tmux, or an older one than is needed.
            TerminalEnded: tmux could not be started; the text says why.
            OSError: the agent has no descriptors left for the pipes.
        """
        runtime = self._process.runtime
        folder = os.path.join(runtime.tmp, ".terminal-%s" % secrets.token_hex(8))
        if len(folder) > _MAX_SOCKET_PATH_BYTES:
            folder = os.path.join("/tmp", os.path.basename(folder))
        argv = [runtime.shell, b"-c", _SCRIPT.encode(), b"terminal", folder, str(width), str(height), runtime.shell]
        self._process.start_process(program_spec(argv, None, runtime.workspace, has_stdin_pipe=True, outlives_calls=True))
        self._reader = self._loop.create_task(self._read_output())
        try:
            check_version(await self._wait_for(self._version))
            await self._wait_for(self._attached)
        except (InvalidArgs, TerminalEnded):
            self.end_terminal("it could not be started")
            raise

    async def send_commands(self, commands: Sequence[bytes], replies: Sequence[ShortReply]) -> None:
        """Send commands to tmux, and wait for their replies.

        Args:
            commands: the commands. tmux executes them at once, without printing output of programs between them.
            replies: receive the replies, one for each command.

        Raises:
            TerminalEnded: tmux has ended, does not reply, has refused a command, or breaks its protocol. It is then being ended.
        """
        if self.ended.is_set() or self._process.stdin is None:
            raise TerminalEnded(self.end_reason)
        self._parser.expect_replies(replies)
        self._process.stdin.write_stdin(b" ; ".join(commands) + b"\n")
        for reply in replies:
            if not await self._wait_for(reply.done):
                self.end_terminal("tmux has refused a command: %s" % b" ".join(reply.lines).decode("utf-8", "replace")[:_MAX_TEXT_CHARS])
                raise TerminalEnded(self.end_reason)

    async def _wait_for(self, future: asyncio.Future[Any]) -> Any:
        """Wait for a future that something tmux writes will complete."""
        ended = self._loop.create_task(self.ended.wait())
        try:
            await asyncio.wait([future, ended], timeout=REPLY_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if future.done():
            return future.result()
        if not self.ended.is_set():
            self.end_terminal("tmux did not reply within %g s" % REPLY_WITHIN_S)
        raise TerminalEnded(self.end_reason)

    # The output of the client.

    async def _read_output(self) -> None:
        """Read what the client writes. While this pauses, the pipe is full, and tmux stops the programs that print."""
        self._has_reader_begun = True
        spent_s = 0.0  # the time that the output has taken since the agent last left it alone
        try:
            while True:
                data = self._process.try_read_output()
                if data is None:
                    await self._process.wait_for_output(_READ_AGAIN_S)
                    continue
                if not data:
                    return
                began = self._loop.time()
                self._parser.feed(data)
                spent_s += self._loop.time() - began
                pause_s = _BUSY_FACTOR * spent_s if spent_s > _SHORT_WORK_S else 0.0
                spent_s = 0.0 if pause_s else spent_s
                await asyncio.sleep(pause_s)  # always: the slot can write so that there is always something to read
        except ControlModeError as error:
            self.end_terminal(str(error))
        finally:
            self._process.close_output()
            self.end_terminal("tmux has closed its connection")

    def on_attached(self) -> None:
        """See `ControlModeListener`."""
        if not self._attached.done():
            self._attached.set_result(None)

    def on_pane_output(self, data: bytes) -> None:
        """See `ControlModeListener`."""
        self._on_output(data)

    def on_text(self, line: bytes) -> None:
        """See `ControlModeListener`."""
        text = line.decode("utf-8", "replace")[:_MAX_TEXT_CHARS]
        if line.startswith(_HELLO) and not self._version.done():
            self._version.set_result(text[len(_HELLO) :])
        elif text:
            self._text.append(text)

    # The end.

    def end_terminal(self, reason: str) -> None:
        """End the processes in the background, unless they have ended. Everything that waits for a reply gets `TerminalEnded`."""
        if self.ended.is_set():
            return
        self.release_process(reason)
        self._tasks.start_task(self._end_tree())

    def release_process(self, reason: str) -> None:
        """Close the pipes, and use the processes no more. The caller, or the end of the slot runtime, ends them."""
        if self.ended.is_set():
            return
        self.end_reason = "; ".join([reason, *self._text])
        self.ended.set()
        if self._process.stdin is not None:
            self._process.stdin.close_stdin()
        if self._reader is not None:
            self._reader.cancel()
            if not self._has_reader_begun:  # then the task ends without a step, and does not close the pipe itself
                self._process.close_output()

    async def _end_tree(self) -> None:
        try:
            await self._process.end_tree()
        except OSError as error:
            log.warning("the processes of a terminal could not be ended; they end with the slot", extra={"slot_id": self.runtime.slot_id, "detail": str(error)})
        finally:
            self._process.release_leaf()
            self._gone.set()

    async def wait_until_gone(self) -> None:
        """Wait until all processes of the terminal have ended, after `end_terminal`."""
        await self._gone.wait()

    # The reports of the process.

    def on_still_running(self) -> None:
        """See `ProcessListener`. A terminal has no deadlines; the calls that use it have."""

    def on_output(self) -> None:
        """See `ProcessListener`. This object reads the output itself."""

    def on_process_ended(self, status: int, cpu_s: float, max_rss_bytes: int) -> None:
        """See `ProcessListener`. The reader first parses what the client has written before its end."""
        self._loop.call_later(_READ_REST_WITHIN_S, self.end_terminal, "tmux has ended")

    def on_process_refused(self, errno: int, step: str) -> None:
        """See `ProcessListener`."""
        self.end_terminal("it could not be started (%s): %s" % (step, os.strerror(errno)))

    def on_init_lost(self, detail: str) -> None:
        """See `ProcessListener`."""
        self.release_process(detail)

"""The terminal of a lease. It starts with the first action, and starts again when it has ended."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from sandbox_server.agent.execution.background_tasks import BackgroundTasks
from sandbox_server.agent.execution.output import Spool
from sandbox_server.agent.execution.processes.drains import Drains
from sandbox_server.agent.execution.slot_probe import NoAnswer, ask_slot
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.execution.tmux.control_mode import PANE, CaptureReply, ShortReply
from sandbox_server.agent.execution.tmux.keys import send_keys_command
from sandbox_server.agent.execution.tmux.recording import RECORDING_NAME, Recording
from sandbox_server.agent.execution.tmux.screen import (
    ENTIRE,
    INCREMENTAL,
    SCREEN,
    STATE_FORMAT,
    CaptureRange,
    OutputPosition,
    PaneState,
    parse_state,
)  # fmt: skip
from sandbox_server.agent.execution.tmux.settling import QUIET_S, TerminalActivity, is_settled, required_quiet_s
from sandbox_server.agent.execution.tmux.tmux_process import TerminalEnded, TmuxProcess

DEFAULT_WIDTH, DEFAULT_HEIGHT = 160, 40
_PROMPT_WITHIN_S = 5.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 1.0
_MODE_WITHIN_S = 10.0
_EXIT_CODE_WITHIN_S, _EXIT_CODE_WITHIN_MOST_S = 1.0, 10.0  # the second where the call has so much time left
_START_JOB_COMMAND = b"display-message -p '#(:)'"
_STATE_COMMAND = b"display-message -p -t %s '%s'" % (PANE, STATE_FORMAT.encode())


@dataclasses.dataclass(frozen=True)
class TerminalAction:
    """One action on a terminal.

    Args:
        action: `send_keys`, `capture`, `resize` or `reset`.
        keys: what `send_keys` sends.
        block: whether to wait until the program has settled.
        min_wait_s: how long to wait at least before the screen is captured, in seconds.
        max_wait_s: how long to wait at most, in seconds.
        captured: `screen`, `incremental` or `entire`.
        width: the columns that the terminal gets first; None: those of now.
        height: the rows that it gets; None: those of now.
    """

    action: str
    keys: tuple[bytes, ...] = ()
    block: bool = False
    min_wait_s: float = 0.0
    max_wait_s: float = 0.0
    captured: str = SCREEN
    width: int | None = None
    height: int | None = None


class TmuxTerminal:
    """The terminal of one lease, and its recording.

    Args:
        spool: keeps the recording.
        drains: of the slot.
        tasks: runs background tasks.
    """

    def __init__(self, spool: Spool, drains: Drains, tasks: BackgroundTasks) -> None:
        self._drains = drains
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._tmux: TmuxProcess | None = None
        self._end_reason: str | None = None  # of the last terminal; None: there was none
        self._size = (DEFAULT_WIDTH, DEFAULT_HEIGHT)
        self._position = OutputPosition()
        self._active_at = 0.0  # when something was last printed or sent, as a time of the event loop
        self._has_printed = False
        self._output = asyncio.Event()  # something was printed
        self.recording = Recording(spool)

    @property
    def is_running(self) -> bool:
        """Whether the terminal has processes."""
        return self._tmux is not None and not self._tmux.ended.is_set()

    async def perform(self, runtime: SlotRuntime, action: TerminalAction, wait_until: float) -> tuple[bytes, dict[str, Any]]:
        """Do an action. Actions of one terminal are done one after the other.

        Args:
            runtime: the slot runtime.
            action: the action.
            wait_until: the time of the event loop at which waiting ends, whatever the action asks for.

        Returns:
            The text of the screen, and the metadata of the result.

        Raises:
            InvalidArgs: the slot has no tmux.
            TerminalEnded: the terminal has ended, or could not be started.
            OSError: the agent has no descriptors left for it.
        """
        async with self._lock:
            facts = await self._make_running(runtime, action, wait_until)
            tmux = self._tmux
            if tmux is None:
                raise TerminalEnded("the slot was reset")
            await self._resize(tmux, action)
            began_at = self._note_activity() if action.keys else asyncio.get_event_loop().time()
            if action.keys:
                await tmux.send_commands([send_keys_command(PANE, action.keys)], [ShortReply()])
            if action.block:
                facts["settled"] = await self._wait_until_settled(tmux, action.min_wait_s, min(began_at + action.max_wait_s, wait_until))
            else:
                await _wait(tmux, action.min_wait_s, wait_until)
            state, text, captured = await self._capture(tmux, action.captured)
            facts.update(captured=captured, **_describe(state))
            if self.recording.path is not None:
                facts["recording"] = RECORDING_NAME
            if self.recording.end_reason:
                facts["recording_ended"] = self.recording.end_reason
            if state.is_dead:
                facts.update(terminal="ended", shell_exit_code=await self._read_exit_code(tmux, state, wait_until))
                self._end("its shell has exited")
            return text, facts

    def release_terminal(self) -> None:
        """Forget the terminal, whose processes are being ended with the slot runtime. The recording stays."""
        if self._tmux is not None:
            self._tmux.release_process("the slot was reset, or its rights have changed")
            self._forget()

    # Start and end.

    async def _make_running(self, runtime: SlotRuntime, action: TerminalAction, wait_until: float) -> dict[str, Any]:
        """Start the terminal if it does not run. Returns what the result says about that."""
        if action.action == "reset" and self._tmux is not None:
            tmux = self._tmux
            self._end("it was reset")
            await tmux.wait_until_gone()
        if self._tmux is not None and self._tmux.ended.is_set():
            self._forget()
        if self._tmux is not None:
            return {"terminal": "running"}
        facts = {"terminal": "started"} if self._end_reason is None else {"terminal": "restarted", "terminal_ended": self._end_reason}
        self._size = _size_of(action, self._size)
        await self._start(runtime, wait_until)
        return facts

    async def _start(self, runtime: SlotRuntime, wait_until: float) -> None:
        tmux = TmuxProcess(runtime, self._drains, self._tasks, self._take_output)
        self._position = OutputPosition()
        self._note_activity()
        self.recording.start_terminal(*self._size)
        self._tmux = tmux
        try:
            await tmux.start(*self._size)
            # Keys that are sent before the shell reads keys would be echoed twice.
            await self._wait_until_settled(tmux, 0.0, min(self._active_at + _PROMPT_WITHIN_S, wait_until))
        except BaseException:
            self._end("it could not be started")
            raise

    def _end(self, reason: str) -> None:
        if self._tmux is not None:
            self._tmux.end_terminal(reason)
            self._forget()

    def _forget(self) -> None:
        if self._tmux is not None:
            self._end_reason = self._tmux.end_reason
            self._tmux = None
            self.recording.close_file()

    def _take_output(self, data: bytes) -> None:
        self._output.set()
        self._has_printed = True
        self._active_at = asyncio.get_event_loop().time()
        self._position.count_printed(data)
        self.recording.record_output(data)

    def _note_activity(self) -> float:
        """Record that keys are sent now. Returns the time of the event loop."""
        self._has_printed = False
        self._active_at = asyncio.get_event_loop().time()
        return self._active_at

    # The actions.

    async def _resize(self, tmux: TmuxProcess, action: TerminalAction) -> None:
        """Give the terminal the size that the action asks for, if it has another one."""
        size = _size_of(action, self._size)
        if size == self._size:
            return
        await tmux.send_commands([b"resize-window -t %s -x %d -y %d" % (PANE, *size)], [ShortReply()])
        self._size = size
        self.recording.record_size(*size)

    async def _capture(self, tmux: TmuxProcess, captured: str) -> tuple[PaneState, bytes, str]:
        lines = CaptureRange(None) if captured == ENTIRE else CaptureRange()
        if captured == INCREMENTAL:
            new = self._position.find_new_range(await self._read_state(tmux))
            lines, captured = (new, INCREMENTAL) if new is not None else (lines, SCREEN)
        capture, states = CaptureReply(), []

        def take_state(reply: list[bytes]) -> None:
            states.append(parse_state(reply))
            capture.line_count = lines.count_lines(states[0])

        command = b"capture-pane -p -t %s %s" % (PANE, lines.arguments().encode())
        await tmux.send_commands([_STATE_COMMAND, command], [ShortReply(take_state), capture])
        self._position.mark_shown(states[0])
        return states[0], capture.text(), captured

    async def _read_state(self, tmux: TmuxProcess) -> PaneState:
        states: list[PaneState] = []
        await tmux.send_commands([_STATE_COMMAND], [ShortReply(lambda lines: states.append(parse_state(lines)))])
        return states[0]

    async def _read_exit_code(self, tmux: TmuxProcess, state: PaneState, wait_until: float) -> int | None:
        """The exit code of the shell, which tmux knows a moment after the shell has closed the pane.

        A tmux that records its terminals in utmp may lose the signal that the shell has ended: it waits for the helper that removes the record, with the
        signal ignored. It then asks the kernel again when another of its children ends, so it is given one.
        """
        now = asyncio.get_event_loop().time()
        until = max(now + _EXIT_CODE_WITHIN_S, min(now + _EXIT_CODE_WITHIN_MOST_S, wait_until))
        while state.exit_code is None and asyncio.get_event_loop().time() < until:
            await _wait(tmux, _FIRST_PAUSE_S, until)
            state = await self._read_state(tmux)
            if state.exit_code is None:
                await tmux.send_commands([_START_JOB_COMMAND], [ShortReply()])
        return state.exit_code

    # Waiting.

    async def _wait_until_settled(self, tmux: TmuxProcess, min_wait_s: float, wait_until: float) -> bool:
        """Wait until the program waits for keys, or until a time of the event loop. Returns whether it waits for keys, or has ended."""
        loop = asyncio.get_event_loop()
        await _wait(tmux, min_wait_s, wait_until)
        pause_s = _FIRST_PAUSE_S
        while loop.time() < wait_until:
            left_s = self._active_at + required_quiet_s(self._has_printed) - loop.time()
            if left_s > 0:
                await _wait(tmux, min(left_s, QUIET_S), wait_until)
                continue
            if await self._is_settled(tmux):
                return True
            await self._wait_for_output(min(pause_s, wait_until - loop.time()))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return False

    async def _wait_for_output(self, seconds: float) -> None:
        self._output.clear()
        try:
            await asyncio.wait_for(self._output.wait(), seconds)
        except asyncio.TimeoutError:
            pass

    async def _is_settled(self, tmux: TmuxProcess) -> bool:
        active_at = self._active_at
        state = await self._read_state(tmux)
        if state.is_dead:
            return True
        try:
            mode = await ask_slot(tmux.runtime, self._drains, "terminal_mode", {"path": state.tty}, _MODE_WITHIN_S)
        except NoAnswer:
            return False  # the slot can start nothing now, for example because it has reached its limit of processes
        if self._active_at != active_at:
            return False
        quiet_s = asyncio.get_event_loop().time() - active_at
        return is_settled(TerminalActivity(quiet_s, self._has_printed, mode.get("reads_keys") is True, state.cursor_x))


def _size_of(action: TerminalAction, size: tuple[int, int]) -> tuple[int, int]:
    return action.width or size[0], action.height or size[1]


async def _wait(tmux: TmuxProcess, seconds: float, wait_until: float) -> None:
    """Wait so many seconds, at most until a time of the event loop, or until the terminal has ended."""
    seconds = min(seconds, wait_until - asyncio.get_event_loop().time())
    if seconds > 0:
        try:
            await asyncio.wait_for(tmux.ended.wait(), seconds)
        except asyncio.TimeoutError:
            pass


def _describe(state: PaneState) -> dict[str, Any]:
    return {
        "cursor": {"x": state.cursor_x, "y": state.cursor_y},
        "pane_width": state.width,
        "pane_height": state.height,
        "alternate_screen": state.is_alternate,
    }

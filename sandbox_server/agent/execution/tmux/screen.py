"""The state of a pane as tmux reports it, and which of its lines a capture has."""

from __future__ import annotations

import dataclasses
import re

from sandbox_server.agent.execution.tmux.control_mode import ControlModeError

HISTORY_LINES = 20_000
SCREEN, INCREMENTAL, ENTIRE = "screen", "incremental", "entire"
_FIELDS = (
    "history_size", "pane_height", "pane_width", "cursor_x", "cursor_y", "alternate_on", "pane_dead", "pane_pid", "pane_tty",
)  # fmt: skip
STATE_FORMAT = " ".join("#{%s}" % field for field in _FIELDS) + " x#{pane_dead_status}y#{pane_dead_signal}"
_STATE = re.compile(rb"(\d{1,9}) (\d{1,5}) (\d{1,5}) (\d{1,5}) (\d{1,5}) ([01]?) ([01]?) (\d{1,10}) (/dev/pts/\d{1,9}) x(\d{0,3})y(\d{0,3})")


@dataclasses.dataclass(frozen=True)
class PaneState:
    """A pane at one moment.

    Args:
        history_lines: how many lines have scrolled out of the screen and are kept.
        height: the rows of the screen.
        width: its columns.
        cursor_x: the column of the cursor, from 0 on.
        cursor_y: the row of the cursor, from 0 on.
        is_alternate: whether a full-screen program has switched to the alternate screen.
        is_dead: whether the shell of the pane has ended.
        tty: the device of the pane as the slot sees it.
        exit_code: of the shell, 128+n after signal n; None: it runs, or tmux does not know yet how it has ended.
    """

    history_lines: int
    height: int
    width: int
    cursor_x: int
    cursor_y: int
    is_alternate: bool
    is_dead: bool
    tty: str
    exit_code: int | None

    @property
    def cursor_line(self) -> int:
        """The line of the cursor, counted from the first line of the history."""
        return self.history_lines + self.cursor_y


def parse_state(lines: list[bytes]) -> PaneState:
    """Parse the reply to a `display-message` with `STATE_FORMAT`.

    Raises:
        ControlModeError: it has another form.
    """
    match = _STATE.fullmatch(lines[0]) if len(lines) == 1 else None
    if match is None:
        raise ControlModeError("tmux has described its pane in an unknown form")
    history, height, width, x, y = (int(text) for text in match.groups()[:5])
    alternate, dead, _, tty, status, signal_number = match.groups()[5:]
    exit_code = int(status) if status else 128 + int(signal_number) if signal_number else None
    return PaneState(history, height, width, x, y, alternate == b"1", dead == b"1", tty.decode(), exit_code)


@dataclasses.dataclass(frozen=True)
class CaptureRange:
    """Which lines to capture. Rows of the screen count from 0 on; the history has negative numbers.

    Args:
        first: the first line; None: the first of the history.
        last: the last line; None: the last row of the screen.
    """

    first: int | None = 0
    last: int | None = None

    def arguments(self) -> str:
        """The arguments of `capture-pane`."""
        return "-S %s -E %s" % ("-" if self.first is None else self.first, "-" if self.last is None else self.last)

    def count_lines(self, state: PaneState) -> int:
        """How many lines tmux prints. It moves both ends to the lines that there are, and swaps them if they are in the wrong order."""
        end = state.history_lines + state.height - 1
        first = 0 if self.first is None else min(max(0, state.history_lines + self.first), end)
        last = end if self.last is None else min(max(0, state.history_lines + self.last), end)
        return abs(last - first) + 1


class OutputPosition:
    """Where the output begins that no result has shown yet.

    tmux drops the first lines of a full history without counting them. So the line feeds that programs print are counted here: if there may have been too many
    for the history, or if the screen was cleared or is that of a full-screen program, an incremental capture is not possible, and the screen is shown.
    """

    def __init__(self) -> None:
        self._line: int | None = None
        self._printed_lines = 0

    def count_printed(self, data: bytes) -> None:
        """Count the line feeds in what programs have printed."""
        self._printed_lines += data.count(b"\n")

    def mark_shown(self, state: PaneState) -> None:
        """Record that everything up to the cursor was shown."""
        self._line = None if state.is_alternate else state.cursor_line
        self._printed_lines = 0

    def find_new_range(self, state: PaneState) -> CaptureRange | None:
        """The lines from the one where the cursor was last to the one where it is now. None: an incremental capture is not possible."""
        if self._line is None or state.is_alternate or state.cursor_line < self._line or self._line + self._printed_lines + state.height > HISTORY_LINES:
            return None
        return CaptureRange(self._line - state.history_lines, state.cursor_y)

"""The recording of a terminal as an asciicast of version 2: a header line, then one line for each event. It is complete whenever it is read."""

from __future__ import annotations

import codecs
import errno
import json
import os
import time
from typing import Any, Callable

from sandbox_server.agent.execution.output import Spool

RECORDING_NAME = "terminal.cast"
RECORDING_LIMIT_BYTES = 32 << 20
TERM = "screen-256color"
_RESET_SCREEN = "\x1bc"
_END_BYTES = 1000  # kept free for the event that says why the recording ends


class Recording:
    """The recording of all terminals of one lease, one after the other, in one file of the spool.

    Args:
        spool: has the file.
        limit_bytes: how long the recording may become. After that, its last event says that it ends there.
        clock: returns the time in seconds since the epoch of Unix time.
    """

    def __init__(self, spool: Spool, limit_bytes: int = RECORDING_LIMIT_BYTES, clock: Callable[[], float] = time.time) -> None:
        self._spool = spool
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._started_at = 0.0
        self._last_s = 0.0
        self._size_bytes = 0
        self._fd = -1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.path: str | None = None
        self.end_reason = ""  # why nothing more is recorded; empty: the recording goes on

    def start_terminal(self, width: int, height: int) -> None:
        """Begin the recording of a terminal of this size. If there was one before, it is cleared in the recording."""
        self._decoder.reset()
        if self.end_reason:
            return
        try:
            if self.path is None:
                self.path, self._fd = self._spool.create_file()
                self._started_at = self._clock()
                env = {"TERM": TERM, "SHELL": "/bin/bash"}
                self._write_line({"version": 2, "width": width, "height": height, "timestamp": int(self._started_at), "env": env})
                return
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            self.end_reason = "the recording could not be written: %s" % error
            return
        self.record_size(width, height)
        self._write_event("o", _RESET_SCREEN)

    def record_output(self, data: bytes) -> None:
        """Record what programs have printed. Bytes that are not UTF-8 become U+FFFD; a character may be split between two calls."""
        text = self._decoder.decode(data)
        if text:
            self._write_event("o", text)

    def record_size(self, width: int, height: int) -> None:
        """Record that the terminal has this size from now on."""
        self._write_event("r", "%dx%d" % (width, height))

    def close_file(self) -> None:
        """Close the file. The recording stays, and goes on when the next terminal starts."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write_event(self, kind: str, text: str) -> None:
        if self._fd < 0:
            return
        # The wall clock may be set back; the times of an asciicast never decrease.
        self._last_s = max(self._last_s, round(self._clock() - self._started_at, 6))
        self._write_line([self._last_s, kind, text])

    def _write_line(self, value: Any) -> None:
        line = json.dumps(value, ensure_ascii=False, separators=(", ", ": ")).encode("utf-8", "replace") + b"\n"
        if self._size_bytes + len(line) > self._limit_bytes - _END_BYTES:
            self._end_recording("it has reached its limit of %d bytes" % self._limit_bytes)
        else:
            self._append(line)

    def _end_recording(self, reason: str) -> None:
        self.end_reason = reason
        text = "\r\n[The recording ends here: %s.]\r\n" % reason
        self._append(json.dumps([self._last_s, "o", text]).encode() + b"\n")
        self.close_file()

    def _append(self, line: bytes) -> None:
        """Append a line as a whole, or nothing of it."""
        granted_bytes = self._spool.reserve_bytes(len(line))
        try:
            if granted_bytes < len(line):
                raise OSError(errno.ENOSPC, "the spool of the lease is full")
            if os.pwrite(self._fd, line, self._size_bytes) < len(line):
                os.ftruncate(self._fd, self._size_bytes)
                raise OSError(errno.ENOSPC, "the disk is full")
        except OSError as error:
            self._spool.return_bytes(granted_bytes)
            self.end_reason = "it could not be written: %s" % error.strerror
            self.close_file()
        else:
            self._size_bytes += len(line)

"""Ending a command on SIGINT, SIGTERM and SIGHUP in such a way that the command releases what it holds."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from env_client.cli.failures import Interrupted, interruption_document

#: The signals that end the process at once if they come a second time: the user does not want to wait for the clean-up. A second SIGHUP is only the
#: same terminal closing, so it is ignored.
_FORCING_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
#: What a forced exit leaves behind, one sentence each.
_announcements: list[str] = []


@contextmanager
def announce_on_forced_exit(sentence: str) -> Iterator[None]:
    """Print a sentence if a second signal ends the process inside the block.

    Args:
        sentence: what the process then leaves behind.
    """
    _announcements.append(sentence)
    try:
        yield
    finally:
        _announcements.remove(sentence)


@contextmanager
def interrupt_on_signals(as_json: bool) -> Iterator[None]:
    """Make SIGTERM and SIGHUP interrupt the block as Ctrl-C does, so that it can clean up. A second signal ends the process at once.

    Args:
        as_json: whether a forced exit prints a JSON document instead of the announcements.

    Raises:
        Interrupted: one of the signals came.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        if not interrupted:
            interrupted = True
            raise Interrupted(number)
        if number in _FORCING_SIGNALS:
            if as_json:
                os.write(1, json.dumps(interruption_document(Interrupted(number))).encode() + b"\n")
            else:
                os.write(2, "".join(f"sandbox: {sentence}\n" for sentence in _announcements).encode())
            os._exit(128 + number)

    previous_handlers: dict[signal.Signals, Callable[[int, FrameType | None], Any] | int | None] = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            previous_handlers[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

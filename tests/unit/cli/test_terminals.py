"""What a person types to leave a terminal, and what is undone then."""

from __future__ import annotations

import pytest

from env_client.cli.terminals.escapes import EscapeReader, Typed
from env_client.cli.terminals.screen_modes import ScreenModes


@pytest.mark.parametrize(
    ("pieces", "keys", "leaves"),
    [
        ([b"~."], b"", True),
        ([b"ls\r", b"~", b".", b"never"], b"ls\r", True),
        ([b"~~."], b"~.", False),
        ([b"a~."], b"a~.", False),
        ([b"~x~."], b"~x~.", False),
        ([b"\x1b~."], b"\x1b~.", False),
        ([b"\n~", b"\r~."], b"\n~\r", True),
        ([bytes(range(256))], bytes(range(256)), False),
    ],
)
def test_a_tilde_and_a_dot_at_the_beginning_of_a_line_leave(pieces: list[bytes], keys: bytes, leaves: bool) -> None:
    reader, typed = EscapeReader(), b""
    for piece in pieces:
        found = reader.read(piece)
        typed += found.keys
        if found.leaves:
            break

    assert Typed(typed, found.leaves) == Typed(keys, leaves)


@pytest.mark.parametrize(
    ("pieces", "undone"),
    [
        ([b"plain"], b"\x1b[0m"),
        ([b"\x1b[?1049h\x1b[?25l"], b"\x1b[0m\x1b[?1049l\x1b[?25h"),
        ([b"\x1b[?1049h", b"full screen", b"\x1b[?1049l"], b"\x1b[0m"),
        ([b"text \x1b[?10", b"00;1006h"], b"\x1b[0m\x1b[?1006l\x1b[?1000l"),
        ([b"\x1b[?9999h"], b"\x1b[0m"),
    ],
)
def test_modes_that_are_still_set_are_undone(pieces: list[bytes], undone: bytes) -> None:
    modes = ScreenModes()
    for piece in pieces:
        modes.follow(piece)

    assert modes.undo() == undone

"""Keys as tmux's command `send-keys` takes them, written in the command language of tmux."""

from __future__ import annotations

import re
from typing import Sequence

_UNSAFE = re.compile(rb"[^A-Za-z0-9 ]")


def quote_argument(argument: bytes) -> bytes:
    """Quote an argument so that tmux reads exactly these bytes, and no command, variable or end of the line."""
    return b'"' + _UNSAFE.sub(lambda match: b"\\%03o" % match.group()[0], argument) + b'"'


def send_keys_command(pane: bytes, keys: Sequence[bytes]) -> bytes:
    """The command that sends keys to a pane. Each is the name of a key, such as `Enter`, `C-c` or `Up`, or else text.

    Args:
        pane: the id of the pane.
        keys: the keys; none of them is taken as an option of the command.
    """
    return b"send-keys -t %s -- %s" % (pane, b" ".join(map(quote_argument, keys)))

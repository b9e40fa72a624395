"""The operation `terminal_mode`: how the terminal of a slot passes on what is typed."""

from __future__ import annotations

import os
import termios

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Mapping

    from sandbox_server.agent.inslot.reply import Reply

_LOCAL_FLAGS = 3  # The place of c_lflag in the list of `tcgetattr`.


def terminal_mode(args: Mapping[str, Any], ctx: Mapping[str, Any], reply: Reply) -> None:
    """Reply whether a terminal passes on every key at once (`reads_keys`), or whole lines."""
    fd = os.open(args["path"], os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        flags = termios.tcgetattr(fd)[_LOCAL_FLAGS]
    finally:
        os.close(fd)
    reply.send_ok(reads_keys=not flags & termios.ICANON)

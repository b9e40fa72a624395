"""Whether there is a tmux that the tool `tmux` can use."""

from __future__ import annotations

import re
import shutil
import subprocess

from sandbox_server.agent.errors import InvalidArgs

OLDEST_VERSION = (3, 2)  # the first with a server in the foreground, and with a control mode that stops the programs when its client does not read
_VERSION = re.compile(r"tmux (?:next-)?(\d{1,4})\.(\d{1,4})")
_ANSWER_WITHIN_S = 10.0


def find_tmux_version(path: str) -> str:
    """Return what `tmux -V` prints, such as `tmux 3.3a`; empty if there is no tmux, or if it does not run.

    Args:
        path: the folders to search, as in the variable `PATH`.
    """
    program = shutil.which("tmux", path=path)
    if program is None:
        return ""
    try:
        return subprocess.check_output([program, "-V"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_ANSWER_WITHIN_S).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError, subprocess.SubprocessError):
        return ""


def check_version(text: str) -> None:
    """Check what `tmux -V` has printed.

    Args:
        text: that; empty if the slot has no tmux.

    Raises:
        InvalidArgs: the slot has no tmux, or one that is too old.
    """
    needed = "%d.%d" % OLDEST_VERSION
    add = "install tmux %s or newer in the image of the sandbox, or on the machine for the local backend (Debian: apt-get install tmux)" % needed
    if not text:
        raise InvalidArgs("the tool tmux needs the program tmux, which is not on the PATH of the slot; %s" % add)
    match = _VERSION.match(text)
    if match is None or (int(match.group(1)), int(match.group(2))) < OLDEST_VERSION:
        raise InvalidArgs("the tool tmux needs tmux %s or newer, and the slot has %s; %s" % (needed, ascii(text[:50]), add))

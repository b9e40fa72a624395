"""What the agent and the shell of a session say to each other.

The shell is an interactive bash whose standard input is a socket of the agent. It reads lines from it, and writes one report per line of `report_line` to it.
The text of a command is in a file in memory, which the shell evaluates with `.`. So no command can change how the shell reads its lines, and no program that
a command starts has the socket: bash saves it with close-on-exec while a command runs.

An interactive bash is needed for one thing: after SIGINT it abandons the whole list and goes on to read. It has no terminal and no job control; while `.`
evaluates a command, it neither prompts nor announces background jobs. What it writes between commands, such as a prompt that a command has set, goes to
/dev/null.
"""

from __future__ import annotations

import re
from typing import List, Tuple

ARGUMENTS = ("--noprofile", "--rcfile", "/dev/fd/3", "--noediting", "-i")
"""The arguments of bash. Descriptor 3 is the file in memory, whose first content is `start_script`."""

READY = 0
"""The number of the report that says that the shell has been set up."""

MAX_MESSAGE_BYTES = 32
"""No report is longer."""

_OUT, _ERR, _COMMAND = 201, 202, 203
_REPORT = re.compile(rb"(\d{1,9}) (\d{1,3})\Z")
#: bash 5.2 can damage its heap when it parses one of these without its end, and it executes the lines before a syntax error.
_CHECKED_FIRST = (b"\n", b"$(", b"`", b"<(", b">(")

_START = """\
exec %(out)d>&1 %(err)d>&2 %(command)d<&3 3<&- >/dev/null 2>&1
PS1= PS2=
unset HISTFILE MAIL MAILCHECK PROMPT_COMMAND PS0 TMOUT
set +o history +H
shopt -s execfail
shopt -u checkwinsize
__sandbox_report() { local status=$?; builtin printf '%%d %%d\\n' "$1" "$status" >&0; return $status; }
__sandbox_check() { local status=$?; "$2" -O extglob -n </dev/fd/%(command)d >&%(out)d 2>&"$3"; builtin printf '%%d %%d\\n' "$1" $? >&0; return $status; }
true
__sandbox_report %(ready)d
"""


def start_script() -> bytes:
    """The script that sets a new shell up and makes it report that it is ready."""
    return (_START % {"out": _OUT, "err": _ERR, "command": _COMMAND, "ready": READY}).encode()


def needs_check(command: bytes) -> bool:
    """Return whether the syntax of a command must be checked by another bash before the shell of the session evaluates it.

    A single line without substitutions is parsed as a whole before anything of it is executed, and a syntax error in it does the shell no harm.
    """
    return any(text in command.strip(b"\n") for text in _CHECKED_FIRST)


def check_line(number: int, shell: str, has_two_streams: bool) -> bytes:
    """The line that makes another bash check the syntax of the command. The report has the status 0 if the syntax is correct."""
    return b"__sandbox_check %d '%s' %d\n" % (number, shell.encode(), _ERR if has_two_streams else _OUT)


def run_lines(number: int, has_two_streams: bool) -> bytes:
    """The lines that make the shell evaluate the command and report its status. If the command is interrupted, the shell still reads the second line."""
    line = b". /dev/fd/%d </dev/null >&%d 2>&%d\n" % (_COMMAND, _OUT, _ERR if has_two_streams else _OUT)
    return line + b"__sandbox_report %d\n" % number


def report_line(number: int) -> bytes:
    """The line that makes the shell report its last status, as a sign that it reads again. It also ends a line that an interrupt has cut off."""
    return b"\n__sandbox_report %d\n" % number


def parse_reports(data: bytes) -> Tuple[List[Tuple[int, int]], int, bytes]:
    """Read reports. What writes them is not trusted.

    Args:
        data: what has arrived.

    Returns:
        The reports as (number, status); how many lines are no reports; and the beginning of a line whose end has not arrived.
    """
    *lines, rest = data.split(b"\n")
    reports = []
    bad_count = 0
    for line in lines:
        found = _REPORT.match(line)
        if found is None or int(found.group(2)) > 255:
            bad_count += 1
        else:
            reports.append((int(found.group(1)), int(found.group(2))))
    if len(rest) > MAX_MESSAGE_BYTES:
        bad_count, rest = bad_count + 1, b""
    return reports, bad_count, rest

"""The command that the clients run in their slots: it reports to the witness, leaves a mark in the slot, and prints the marks that it found."""

from __future__ import annotations

from dataclasses import dataclass

from tests.faults.checker import FULL_DISK_EXIT

TEXT = """\
shopt -s nullglob
exec 3<>/dev/tcp/127.0.0.1/{port}
echo "ran {call} {lease}" >&3
{pause}
holder= mark=
[ -s holder ] && read -r holder <holder
{look}
files=(*)
{{ echo {call} >>log && echo {lease} >holder{leave}; }} 2>/dev/null || exit {full}
echo "holder=$holder"
echo "mark=$mark"
echo "files=${{files[*]}}"
mapfile -t log <log
echo "log=${{log[*]}}"
"""
LOOK = "[ -s /tmp/mark ] && read -r mark </tmp/mark"
GHOST = '(sleep {seconds}; echo "ghost {call} {lease}" >&3) </dev/null >/dev/null 2>&1 &'


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command.

    Args:
        call_id: the id of the call.
        lease_id: the id of the lease.
        witness_port: the port of the witness.
        sleep_s: how long it takes, in seconds, between its being witnessed and its mark.
        ghost_s: after how many seconds something that it leaves running is witnessed, if the slot is still its holder's; 0: nothing is left.
        private_tmp: whether `/tmp` is the slot's own.
    """

    call_id: str
    lease_id: str
    witness_port: int
    sleep_s: float = 0.0
    ghost_s: float = 0.0
    private_tmp: bool = False

    def text(self) -> str:
        """Return the command for bash."""
        names = {"call": self.call_id, "lease": self.lease_id}
        ghost = GHOST.format(seconds=self.ghost_s, **names) if self.ghost_s else ""
        pause = f"sleep {self.sleep_s:g}" if self.sleep_s else ""
        leave = f" && echo {self.lease_id} >/tmp/mark" if self.private_tmp else ""
        look = LOOK if self.private_tmp else ""
        return TEXT.format(port=self.witness_port, pause="\n".join(filter(None, (ghost, pause))), look=look, leave=leave, full=FULL_DISK_EXIT, **names)

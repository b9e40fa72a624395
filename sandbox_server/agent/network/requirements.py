"""Says what a machine lacks for the network `internet`, without trying it. A pool that uses it finds out whether it works."""

from __future__ import annotations

import glob
import os

from sandbox_server.agent.network.uplink import find_uplink_program

_LIBRARIES = ("/usr/lib/*/libnftables.so.1", "/usr/lib*/libnftables.so.1", "/usr/local/lib/libnftables.so.1")
_TUN = "/dev/net/tun"
_MAX_USER_NAMESPACES = "/proc/sys/user/max_user_namespaces"


def find_missing_requirement(is_root: bool, slot_start: str) -> str | None:
    """Return what this machine lacks, as a sentence without a full stop; None if nothing is known to be missing.

    Args:
        is_root: whether the agent runs as root.
        slot_start: how slots start, see `Isolation.slot_start`.
    """
    try:
        find_uplink_program()
    except OSError as error:
        return str(error.strerror)
    if not any(map(glob.glob, _LIBRARIES)):
        return "the library of nftables is missing (on Debian, the package libnftables1)"
    if slot_start != "forked":
        return "slots are not forked from a template here"
    # Root makes a device of its own beside the one that is there.
    if not (os.path.isdir(os.path.dirname(_TUN)) if is_root else os.access(_TUN, os.R_OK | os.W_OK)):
        return "%s is missing, or not open to this user" % _TUN
    try:
        with open(_MAX_USER_NAMESPACES, encoding="ascii") as file:
            if int(file.read()) == 0:
                return "user namespaces are switched off (%s is 0)" % _MAX_USER_NAMESPACES
    except OSError:
        return "the kernel has no user namespaces"
    return None

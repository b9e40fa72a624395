"""Checks from outside that a template has given up what it does not need."""

from __future__ import annotations

import os

from sandbox_server.agent.errors import StartFailed
from sandbox_server.agent.kernel import procfs

_OPEN_FILES = 4  # The standard streams and its socket.


def check_template(pid: int, capabilities: int, joins_networks: bool = False) -> None:
    """Check what the kernel says about a template that is ready.

    Args:
        pid: its process id.
        capabilities: the mask of the capabilities that it may have.
        joins_networks: whether it starts slots in networks that exist, for which it holds the one that it returns to.

    Raises:
        StartFailed: it has more rights, threads or open files than it needs. The text names them.
    """
    status = procfs.status_fields(pid)
    for name in ("CapEff", "CapPrm"):
        if int(status[name], 16) & ~capabilities:
            raise StartFailed("the template of slots has the capabilities %s (%s)" % (status[name], name))
    for name in ("CapInh", "CapBnd", "CapAmb"):
        if int(status[name], 16):
            raise StartFailed("the template of slots has the capabilities %s (%s)" % (status[name], name))
    if status["NoNewPrivs"] != "1" or status["Threads"] != "1":
        raise StartFailed("the template of slots has %s threads, or can gain privileges" % status["Threads"])
    if os.geteuid() == 0:  # The kernel shows the files of an undumpable process to root alone.
        count = len(os.listdir("/proc/%d/fd" % pid))
        expected = _OPEN_FILES + (1 if joins_networks else 0)
        if count != expected:
            raise StartFailed("the template of slots has %d open files, not %d" % (count, expected))

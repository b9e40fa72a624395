"""The size of pipes: that of a new one, and that of one through which much content passes."""

from __future__ import annotations

import fcntl

PIPE_BYTES = 64 << 10
LARGE_PIPE_BYTES = 256 << 10
_F_SETPIPE_SZ = 1031  # the module fcntl has this constant from Python 3.10 on


def enlarge_pipe(fd: int) -> None:
    """Give a pipe `LARGE_PIPE_BYTES`. It stays as it is where the pipes of this user have reached their total size.

    Args:
        fd: either end of the pipe.
    """
    try:
        fcntl.fcntl(fd, _F_SETPIPE_SZ, LARGE_PIPE_BYTES)
    except OSError:
        pass  # a smaller pipe only costs more wake-ups

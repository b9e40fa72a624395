"""The signal handling that init and all that it starts begin with."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
else:
    import _signal as signal  # `signal` would import `enum`, for which every slot would need memory

IGNORED_BY_INIT = (signal.SIGPIPE, signal.SIGXFSZ)
"""The only signals that init ignores. What it starts gets their defaults."""
_UNCHANGEABLE = (9, 19, 32, 33)  # SIGKILL and SIGSTOP, and two that the C library keeps for itself.


def restore_defaults() -> None:
    """Set the handling of every signal to its default.

    This process may have been started by one that ignores some, and everything that it starts would inherit that.
    """
    for number in range(1, 65):
        if number not in _UNCHANGEABLE:
            signal.signal(number, signal.SIG_DFL)

"""The init of a slot that the template has forked. Its parent is this agent, which therefore learns how it ends."""

from __future__ import annotations

import os
import signal

from sandbox_server.agent.kernel import procfs

_TEMPLATE_NAME, _INIT_NAME = b"slot-template", b"slot-init"  # The names that these processes give themselves, see `agent.template`.
#: The children of this agent that are a template or that a template has forked, and that have not been reaped.
_known_children: set[int] = set()


class ForkedInit:
    """A child process of this agent that another process has forked, with the methods of `subprocess.Popen` that runtimes use.

    Args:
        pid: the process id. The process must not have been reaped.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._ended_with: int | None = None
        _known_children.add(pid)

    def poll(self) -> int | None:
        """Reap the process if it has ended.

        Returns:
            Its exit code, or the number of the signal that has killed it as a negative number; None while it runs.
        """
        if self._ended_with is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # Another object has killed and reaped it, as an init that nobody knew.
                pid, status = self.pid, signal.SIGKILL
            if pid:
                self._ended_with = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                _known_children.discard(self.pid)
        return self._ended_with

    def kill(self) -> None:
        """Send SIGKILL to the process if it has not ended."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        """Send a signal to the process if it has not ended. It is not reaped before `poll` says so, so no other process can have its id."""
        if self.poll() is None:
            os.kill(self.pid, sig)


def add_child(pid: int) -> None:
    """Record that the agent knows a child process: a template, or an init that a template has reported."""
    _known_children.add(pid)


def remove_template(pid: int) -> None:
    """Record that a template has been reaped."""
    _known_children.discard(pid)


def find_unknown_inits() -> list[ForkedInit]:
    """Return the inits that a template has forked and that this agent knows nothing of, because the template has ended before it could report them."""
    found = procfs.children_of(os.getpid())
    return [ForkedInit(pid) for pid, name in found.items() if name in (_TEMPLATE_NAME, _INIT_NAME) and pid not in _known_children]

"""The errors of the agent."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """The agent refuses a request of the service, and answers it with an ABORT frame.

    Args:
        code: one of the codes that the service knows: stale_epoch, unknown_slot, slot_unavailable, not_implemented, invalid, path_outside,
            file_not_found, file_error, call_not_found, port_closed, limit_reached, internal.
        detail: why, as one sentence for a person.
        errno: the symbolic name of the errno that caused it, for example ENOENT. None: no system call failed.
        agent_ends: whether the agent refuses because it shuts down. It then refuses every later call as well.
    """

    def __init__(self, code: str, detail: str, errno: str | None = None, agent_ends: bool = False) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.errno = errno
        self.agent_ends = agent_ends

    def meta(self) -> dict[str, Any]:
        """The payload of the ABORT frame."""
        meta: dict[str, Any] = {"code": self.code, "detail": self.detail}
        if self.errno is not None:
            meta["errno"] = self.errno
        if self.agent_ends:
            meta["agent_ends"] = True
        return meta


class StartFailed(Exception):
    """The runtime of a slot could not be started.

    Args:
        detail: the error that occurred.
        temporary: whether a retry may succeed, because the machine was short of some resource.
        errno: the errno of the system call that failed; 0 if it is not known.
    """

    def __init__(self, detail: str, temporary: bool = False, errno: int = 0) -> None:
        super().__init__(detail)
        self.temporary = temporary
        self.errno = errno


class InvalidArgs(Exception):
    """The arguments of a call are not valid for its tool. The text names the argument."""


class UnknownTool(InvalidArgs):
    """No tool has this name."""


class ToolError(Exception):
    """A tool could not do what the call asked for. The text says why."""

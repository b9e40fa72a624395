"""What the agent refuses, by code."""

from __future__ import annotations

from typing import Any


class Refused(Exception):
    """A request of the service that is answered with an ABORT.

    Args:
        code: one of the codes the service knows: stale_epoch, unknown_slot, slot_unavailable, not_implemented, invalid, path_outside,
            file_not_found, file_error, call_not_found, internal.
        detail: one sentence for a person.
        errno: the name of the errno behind it, where there is one.
    """

    def __init__(self, code: str, detail: str, errno: str | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.errno = errno

    def meta(self) -> dict[str, Any]:
        """The payload of the ABORT."""
        meta = {"code": self.code, "detail": self.detail}
        if self.errno is not None:
            meta["errno"] = self.errno
        return meta


class StartFailed(Exception):
    """A slot's body could not be started; the text is the error it met.

    Args:
        detail: the text.
        temporary: the machine was short of something, and the same may work in a moment.
    """

    def __init__(self, detail: str, temporary: bool = False) -> None:
        super().__init__(detail)
        self.temporary = temporary


class InvalidArgs(Exception):
    """A call's arguments do not fit its tool; the text names the argument."""


class UnknownTool(InvalidArgs):
    """There is no such tool."""

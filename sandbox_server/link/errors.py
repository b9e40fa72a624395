"""What can go wrong between the service and an agent.

LinkError
├── LinkLost                  the connection ended; the request may or may not have been carried out
├── AgentSilent               the connection stands, but the agent does not respond; the request may or may not have been carried out, or may be later
├── AgentProtocolError        the agent sent something that does not follow the protocol
└── AgentRefused              the agent refused the request, or failed to carry it out
    ├── NotSupportedByAgent   this agent, or its isolation mode, cannot do this; repeating the request does not help
    │   └── ReadOnlyNotSupported   it cannot make entries of a workspace read-only
    ├── RequestInvalid        the arguments are wrong: a path that leads out of the slot, or a right that the slot does not have
    ├── SlotUnavailable       the slot is unknown, broken or in another epoch; the pool knows what became of the lease
    │   └── AgentShutsDown    the agent shuts down and refuses every call from now on; its connection ends soon
    ├── CallUnknown           the agent has no call with this id
    ├── PathNotFound          there is no file at this path
    ├── PortRefused           nobody listens on the port, or the program that does has broken the connection
    ├── PortsInUse            the slot has as many connections to its ports as it may have
    ├── FileOperationFailed   the operating system refused the file operation
    └── AgentFailed           any other failure, inside the agent
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MAX_DETAIL_CHARS = 2000


class LinkError(Exception):
    """Something went wrong between the service and an agent."""


class LinkLost(LinkError):
    """The connection to the agent ended."""


class AgentSilent(LinkError):
    """The connection to the agent stands, but no data arrived from the agent, not even in response to a ping.

    Args:
        silent_s: for how long no data arrived, in seconds.
    """

    def __init__(self, silent_s: float) -> None:
        super().__init__(f"the agent has not answered for {silent_s:g} s")


class AgentProtocolError(LinkError):
    """The agent sent something that does not follow the protocol."""


class AgentRefused(LinkError):
    """The agent refused a request, or failed to carry it out. `agent_refusal` picks the subclass by the agent's code.

    Args:
        meta: the agent's message: `code`, `detail`, and whatever else the code comes with.

    Attributes:
        code: the agent's code; `internal` where the agent sent none or one that is not in the closed set.
        detail: the agent's explanation, at most 2,000 characters.
    """

    def __init__(self, meta: Mapping[str, Any]) -> None:
        code = meta.get("code")
        self.code: str = code if isinstance(code, str) and code in _CLASS_BY_CODE else "internal"
        self.detail = str(meta.get("detail") or "the agent gave no reason")[:_MAX_DETAIL_CHARS]
        self.meta = dict(meta)
        super().__init__(f"{self.code}: {self.detail}")


class NotSupportedByAgent(AgentRefused):
    """This agent, or its isolation mode, cannot do this. Repeating the request does not help."""


class ReadOnlyNotSupported(NotSupportedByAgent):
    """The agent does not report the capability `read_only`. An older agent would ignore the request, so it is not sent."""

    def __init__(self) -> None:
        super().__init__({"code": "not_implemented", "detail": "the isolation mode of the slot cannot make entries of its workspace read-only"})


class RequestInvalid(AgentRefused):
    """The arguments of the request are wrong."""


class SlotUnavailable(AgentRefused):
    """The slot is unknown to the agent, broken, or in another epoch."""


class AgentShutsDown(SlotUnavailable):
    """The agent shuts down and refuses every call from now on."""


class CallUnknown(AgentRefused):
    """The agent has no call with this id."""


class PathNotFound(AgentRefused):
    """There is no file at this path."""


class FileOperationFailed(AgentRefused):
    """The operating system refused the file operation."""

    @property
    def errno_name(self) -> object:
        """The name of the system error as the agent sent it, such as `EISDIR`; None where it sent none."""
        return self.meta.get("errno")


class PortRefused(AgentRefused):
    """Nobody listens on the port of the slot, or the program that does has broken the connection."""


class LimitReachedAtAgent(AgentRefused):
    """The slot, the lease or its terminal has as many of something as it may have."""


class AgentFailed(AgentRefused):
    """The agent failed in some other way."""


_CLASS_BY_CODE: Mapping[str, type[AgentRefused]] = {
    "stale_epoch": SlotUnavailable,
    "unknown_slot": SlotUnavailable,
    "slot_unavailable": SlotUnavailable,
    "not_implemented": NotSupportedByAgent,
    "invalid": RequestInvalid,
    "path_outside": RequestInvalid,
    "file_not_found": PathNotFound,
    "file_error": FileOperationFailed,
    "call_not_found": CallUnknown,
    "port_closed": PortRefused,
    "limit_reached": LimitReachedAtAgent,
    "internal": AgentFailed,
}


def agent_refusal(meta: Mapping[str, Any]) -> AgentRefused:
    """Make the error that stands for an agent's refusal.

    Args:
        meta: the agent's message.
    """
    code = meta.get("code")
    error_class = _CLASS_BY_CODE.get(code if isinstance(code, str) else "internal", AgentFailed)
    if error_class is SlotUnavailable and meta.get("agent_ends") is True:
        error_class = AgentShutsDown
    return error_class(meta)

"""What can go wrong between the service and an agent.

LinkError
├── LinkLost        the connection ended; what was asked may or may not have been done
├── AgentSilent     the connection stands, but the agent does not answer; what was asked may or may not have been done, or may be done later
└── AgentRefused    the agent answered that it will not or cannot; nothing was done beyond what it says
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class LinkError(Exception):
    """Something went wrong between the service and an agent."""


class LinkLost(LinkError):
    """The connection to the agent ended."""


class AgentSilent(LinkError):
    """The connection to the agent stands, but nothing was heard of the agent, although it was asked for a sign of life.

    Args:
        silent_s: for how long nothing was heard, in seconds.
    """

    def __init__(self, silent_s: float) -> None:
        super().__init__(f"the agent has not answered for {silent_s:g} s")


class AgentRefused(LinkError):
    """The agent refused, or failed at, what it was asked.

    Args:
        code: one of the agent's closed set (`stale_epoch`, `unknown_slot`, `slot_unavailable`, `not_implemented`, `invalid`, `path_outside`,
            `file_not_found`, `file_error`, `call_not_found`, `internal`); anything else is kept as `internal`.
        detail: the agent's sentence.
        meta: everything it said.
    """

    CODES = frozenset(
        {
            "stale_epoch",
            "unknown_slot",
            "slot_unavailable",
            "not_implemented",
            "invalid",
            "path_outside",
            "file_not_found",
            "file_error",
            "call_not_found",
            "internal",
        }
    )

    def __init__(self, meta: Mapping[str, Any]) -> None:
        code = meta.get("code")
        self.code: str = code if isinstance(code, str) and code in self.CODES else "internal"
        self.detail = str(meta.get("detail") or "the agent gave no reason")[:2000]
        self.meta = dict(meta)
        super().__init__(f"{self.code}: {self.detail}")

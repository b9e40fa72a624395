"""What makes a call run at most once: call id -> its identity, and the call while it runs or its verdict once it is over."""

from __future__ import annotations

import dataclasses
import hashlib
import marshal
from typing import Any, Callable, Mapping, Sequence

from sandbox_server.agent.execution.output import Kept

LARGE_OUTPUT_BYTES = 64 << 10  # a result with more output than this does not carry it: the service fetches it
_MARSHAL_PLAIN = 0  # the one version whose bytes depend on the values alone
MAX_CALLS = 100_000
NOT_RECORDED = frozenset({"backend_error", "call_conflict", "not_implemented"})


@dataclasses.dataclass
class CallOutcome:
    """How a call ended. `outputs`: one, or standard output and error apart."""

    call_id: str
    reason: str
    exit_code: int | None
    error: str
    started_at: float
    duration_s: float
    cpu_s: float
    max_rss_bytes: int
    tool_ok: bool
    metadata: dict[str, Any]
    outputs: Sequence[Kept]
    encoding: str = "utf-8"
    on_fetched: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    @property
    def is_large(self) -> bool:
        """Whether the output of the result is to be fetched in pieces, by a service that can do so."""
        return sum(kept.cut_bytes for kept in self.outputs) > LARGE_OUTPUT_BYTES

    def item(self) -> tuple[dict[str, Any], bytes]:
        """The verdict as the service gets it: a JSON object, and the output beside it."""
        parts = [kept.cut() for kept in self.outputs]
        return self._meta([len(part) for part in parts]), parts[0] if len(parts) == 1 else b"".join(parts)

    def head(self) -> dict[str, Any]:
        """The verdict without its output, which waits to be fetched."""
        return {**self._meta([kept.cut_bytes for kept in self.outputs]), "output_waits": True}

    def _meta(self, lengths: Sequence[int]) -> dict[str, Any]:
        metadata = self.metadata
        if any(kept.evicted for kept in self.outputs):
            metadata = dict(metadata, output_evicted=True)
        return {
            "call_id": self.call_id,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "error": self.error,
            "output_bytes": sum(kept.total for kept in self.outputs),
            "truncated": any(kept.truncated for kept in self.outputs),
            "encoding": self.encoding,
            "started_at": self.started_at,
            "duration_s": self.duration_s,
            "cpu_s": self.cpu_s,
            "max_rss_bytes": self.max_rss_bytes,
            "tool_ok": self.tool_ok,
            "metadata": metadata,
            "lens": list(lengths),
        }


@dataclasses.dataclass
class Entry:
    """One line of the journal: `call` while it runs, then `verdict`."""

    identity: bytes
    call: Any
    outcome: CallOutcome | None = None


def identity(tool: str, args: Mapping[str, Any]) -> bytes:
    """What makes two calls the same: the tool and its arguments."""
    return hashlib.sha256(marshal.dumps((tool, _canonical(args)), _MARSHAL_PLAIN)).digest()


def _canonical(value: Any) -> Any:
    """A JSON value with the order of its keys taken out."""
    if isinstance(value, dict):
        return ("object", sorted((key, _canonical(item)) for key, item in value.items()))
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value


class Journal:
    """The calls of one slot under one epoch."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, call_id: str) -> Entry | None:
        """The line of a call, if it was ever begun."""
        return self._entries.get(call_id)

    @property
    def full(self) -> bool:
        """Whether no more calls are taken."""
        return len(self._entries) >= MAX_CALLS

    def begin(self, call_id: str, what: bytes, call: Any) -> Entry:
        """A call begins."""
        entry = self._entries[call_id] = Entry(what, call)
        return entry

    def end(self, call_id: str, outcome: CallOutcome) -> None:
        """A call has its verdict. What is not to be recorded is forgotten, so that asking again may fetch the real one."""
        if outcome.reason in NOT_RECORDED:
            del self._entries[call_id]
            return
        entry = self._entries[call_id]
        entry.call = None
        entry.outcome = outcome

    def running(self) -> list[Any]:
        """The calls that have no verdict yet."""
        return [entry.call for entry in self._entries.values() if entry.outcome is None]

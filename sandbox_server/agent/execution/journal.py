"""The journal of the calls of one lease. It makes sure that a call runs at most once, however often it is sent."""

from __future__ import annotations

import dataclasses
import hashlib
import marshal
from typing import Any, Callable, Mapping, Sequence

from sandbox_server.agent.execution.output import FinishedOutput

LARGE_OUTPUT_BYTES = 64 << 10  # a result with more output is sent without it, and the service fetches the output
_MARSHAL_VERSION = 0  # the only version whose bytes depend on the values alone
MAX_CALLS = 100_000
NOT_RECORDED = frozenset({"backend_error", "call_conflict", "not_implemented"})


@dataclasses.dataclass
class CallOutcome:
    """How a call ended.

    Args:
        call_id: the call.
        reason: one of the reasons of the HTTP contract.
        exit_code: of the process, if it exited.
        error: what went wrong, as a sentence; empty: nothing.
        started_at: when the call began, in seconds since the epoch of Unix time.
        duration_s: how long it took, in seconds.
        cpu_s: the processor time of its processes, in seconds.
        max_rss_bytes: the largest resident set of one of its processes.
        tool_ok: whether a tool that is not a shell succeeded.
        metadata: further facts, such as the evidence for the reason.
        outputs: the output; or standard output and standard error.
        encoding: see `CallSpec`.
        on_fetched: called when the service has fetched the output.
    """

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
    outputs: Sequence[FinishedOutput]
    encoding: str = "utf-8"
    on_fetched: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    @property
    def is_large(self) -> bool:
        """Whether a service that can do so fetches the output of the result in pieces."""
        return sum(output.result_size_bytes for output in self.outputs) > LARGE_OUTPUT_BYTES

    def to_item(self) -> tuple[dict[str, Any], bytes]:
        """The result as it is sent to the service: a JSON object, and the output."""
        parts = [output.read_for_result() for output in self.outputs]
        return self._meta([len(part) for part in parts]), parts[0] if len(parts) == 1 else b"".join(parts)

    def to_item_without_output(self) -> dict[str, Any]:
        """The result without its output, which the service is to fetch."""
        return {**self._meta([output.result_size_bytes for output in self.outputs]), "output_waits": True}

    def _meta(self, lengths_bytes: Sequence[int]) -> dict[str, Any]:
        metadata = self.metadata
        if any(output.is_evicted for output in self.outputs):
            metadata = dict(metadata, output_evicted=True)
        return {
            "call_id": self.call_id,
            "reason": self.reason,
            "exit_code": self.exit_code,
            "error": self.error,
            "output_bytes": sum(output.total_bytes for output in self.outputs),
            "truncated": any(output.is_truncated for output in self.outputs),
            "encoding": self.encoding,
            "started_at": self.started_at,
            "duration_s": self.duration_s,
            "cpu_s": self.cpu_s,
            "max_rss_bytes": self.max_rss_bytes,
            "tool_ok": self.tool_ok,
            "metadata": metadata,
            "lens": list(lengths_bytes),
        }


@dataclasses.dataclass
class JournalEntry:
    """One call in the journal: `call` while it runs, `outcome` afterwards."""

    identity: bytes
    call: Any
    outcome: CallOutcome | None = None


def call_identity(tool: str, args: Mapping[str, Any]) -> bytes:
    """A digest of the tool and its arguments. Two calls with the same id must have the same digest."""
    return hashlib.blake2b(marshal.dumps((tool, _canonical(args)), _MARSHAL_VERSION), digest_size=32).digest()


def _canonical(value: Any) -> Any:
    """A JSON value in a form that does not depend on the order of its keys."""
    if isinstance(value, dict):
        return ("object", sorted((key, _canonical(item)) for key, item in value.items()))
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return value


class Journal:
    """The calls of one lease, by call id."""

    def __init__(self) -> None:
        self._entries: dict[str, JournalEntry] = {}

    def get_entry(self, call_id: str) -> JournalEntry | None:
        """The entry of a call, if the call was ever started."""
        return self._entries.get(call_id)

    @property
    def is_full(self) -> bool:
        """Whether the lease has had as many calls as it may have."""
        return len(self._entries) >= MAX_CALLS

    def record_start(self, call_id: str, identity: bytes, call: Any) -> JournalEntry:
        """Record that a call starts."""
        entry = self._entries[call_id] = JournalEntry(identity, call)
        return entry

    def record_outcome(self, call_id: str, outcome: CallOutcome) -> None:
        """Record how a call ended. An outcome of which nothing may have run is forgotten, so that the same call can be sent again."""
        if outcome.reason in NOT_RECORDED:
            del self._entries[call_id]
            return
        entry = self._entries[call_id]
        entry.call = None
        entry.outcome = outcome

    def running_calls(self) -> list[Any]:
        """The calls that have not ended."""
        return [entry.call for entry in self._entries.values() if entry.outcome is None]

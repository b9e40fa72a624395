"""The values of run-batches: programs, requests, artifacts, and the results of items."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from sandbox_server.core.clock import Clock
from sandbox_server.core.execution import DEFAULT_OUTPUT_LIMIT_BYTES, Reason, Result, ToolCall
from sandbox_server.dispatch.results import service_result, with_refusal_time

MAX_JSON_ITEMS = 1000
"""How many items a run-batch may have that is sent as one JSON object; fixed by the contract."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One item of a run-batch. It is validated, except that `args` are checked by the tool.

    Attributes:
        tool: the tool that runs it.
        args: the arguments of the tool.
        args_problem: what is wrong with the arguments that the client sent; None if they can be sent to an agent.
        files: the files that are written into the workspace first, by their paths relative to it.
        timeout_s: how long it may run, in seconds; None for the pool's `default_timeout_s`.
        output_limit_bytes: how much of its output its result contains.
        artifacts: the paths of the files that are read at its end.
        allow_network: False takes the network away from its slot; None leaves what the pool gives.
    """

    tool: str
    args: Mapping[str, Any] = field(default_factory=dict)
    args_problem: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    timeout_s: float | None = None
    output_limit_bytes: int = DEFAULT_OUTPUT_LIMIT_BYTES
    artifacts: tuple[str, ...] = ()
    allow_network: bool | None = None

    def call(self, index: int, lease_id: str) -> ToolCall:
        """The tool call that runs the program.

        Args:
            index: the place of the item in the request.
            lease_id: the lease of the item's slot; empty where the item has none.
        """
        return ToolCall(
            call_id=call_id_of(index), lease_id=lease_id, tool=self.tool, args=self.args, timeout_s=self.timeout_s, output_limit_bytes=self.output_limit_bytes
        )


def call_id_of(index: int) -> str:
    """The id of the call of an item. Each item has a lease of its own, so that the id need not be unique among requests."""
    return f"item-{index}"


def encode_program(program: Program) -> bytes:
    """Encode a program as JSON. Equal programs have equal encodings."""
    document = {
        "tool": program.tool,
        "args": program.args,
        "args_problem": program.args_problem,
        "files": {path: base64.b64encode(content).decode("ascii") for path, content in program.files.items()},
        "timeout_s": program.timeout_s,
        "output_limit_bytes": program.output_limit_bytes,
        "artifacts": program.artifacts,
        "allow_network": program.allow_network,
    }
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


def decode_program(encoded: bytes) -> Program:
    """Decode what `encode_program` has made."""
    document = orjson.loads(encoded)
    files = {path: base64.b64decode(content) for path, content in document.pop("files").items()}
    artifacts = tuple(document.pop("artifacts"))
    return Program(files=files, artifacts=artifacts, **document)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunBatchRequest:
    """The fields of a run-batch besides its items.

    Attributes:
        tenant: the tenant that sends it.
        pool: the name of the pool whose slots the items get.
        run_id: the run that owns the leases of the items.
        request_key: names the run-batch, so that a repeated request gets the same results; None if it cannot be repeated.
        max_parallel: how many items may have a slot at once; None for half of the pool's slots.
    """

    tenant: str
    pool: str
    run_id: str | None = None
    request_key: str | None = None
    max_parallel: int | None = None

    def digest_seed(self) -> bytes:
        """The fields that two requests with one key must have in common, besides their items."""
        return orjson.dumps([self.pool, self.run_id, self.max_parallel])


class ItemsDigest:
    """The digest of a whole request. It is the same for JSON and NDJSON.

    Args:
        request: the fields besides the items.
    """

    def __init__(self, request: RunBatchRequest) -> None:
        self._hash = hashlib.sha256(request.digest_seed())

    def add_item(self, encoded: bytes) -> None:
        """Add the next item, as `encode_program` has encoded it."""
        self._hash.update(len(encoded).to_bytes(8, "big"))
        self._hash.update(encoded)

    def hexdigest(self) -> str:
        """The digest of everything that was added."""
        return self._hash.hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Artifact:
    """A file that was read at the end of an item, or why it could not be read.

    Attributes:
        content: the content of the file; None if it could not be read.
        code: the error code, where it could not be read.
        error: the sentence about it.
    """

    content: bytes | None = None
    code: str = ""
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemResult:
    """What an item came to: the result of its call, and its artifacts by path."""

    result: Result
    artifacts: Mapping[str, Artifact] = field(default_factory=dict)

    @property
    def has_not_run(self) -> bool:
        """Whether the infrastructure failed before the program began, so that running it again is safe."""
        return self.result.reason in (Reason.BACKEND_ERROR, Reason.SANDBOX_LOST) and self.result.metadata.get("may_have_run") is False

    @property
    def is_stopping(self) -> bool:
        """Whether the item has no outcome because the service stopped."""
        return self.result.metadata.get("stopping") is True

    @property
    def is_final(self) -> bool:
        """Whether a repeated request gets this result. If not, the item is started again."""
        return not self.has_not_run and not self.is_stopping


RenderItem = Callable[[int, ItemResult], AsyncGenerator[bytes, None]]
"""Makes the JSON of an item's result, in pieces and without a line end; the first argument is the place of the item in the request."""


def result_without_call(
    index: int, reason: Reason, error: str, clock: Clock, *, may_have_run: bool | None = None, stopping: bool = False, lease_id: str = ""
) -> ItemResult:
    """The result of an item that the service ends itself.

    Args:
        index: the place of the item in the request.
        reason: how it ended.
        error: the explanation for the client.
        clock: gives the time.
        may_have_run: whether the program may have run; None where the reason says so already.
        stopping: whether the item ends because the service stops.
        lease_id: the lease of the item's slot, if it had one.
    """
    call = ToolCall(call_id=call_id_of(index), lease_id=lease_id, tool="", args={})
    result = with_refusal_time(service_result(call, reason, error, may_have_run=may_have_run), clock)
    return ItemResult(result=replace(result, metadata={**result.metadata, "stopping": True}) if stopping else result)

"""The named limits of sizes, counts and times that requests are held to, with their defaults and the errors for what exceeds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from sandbox_server.core.errors import InvalidRequest, PayloadTooLarge, PoolServiceError, QuotaExceeded


def _limit(default: int, text: str, *, most: int | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"text": text, "most": most})


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The named limits of the service. The settings file sets them under `limits`; `text_of` gives what each of them counts."""

    body_bytes: int = _limit(32 << 20, "bytes in one JSON body")
    body_memory_bytes: int = _limit(512 << 20, "bytes of JSON bodies held in memory at once")
    body_wait_s: int = _limit(10, "seconds of waiting for memory for a JSON body")
    body_stall_s: int = _limit(60, "seconds in which a client sends nothing of its JSON body")
    json_depth: int = _limit(64, "levels in one JSON body")
    json_values: int = _limit(200_000, "objects, lists and members in one JSON body")
    query_bytes: int = _limit(16 << 10, "bytes in the path and query of one request")
    header_bytes: int = _limit(64 << 10, "bytes in the headers of one request")
    batch_calls: int = _limit(1000, "calls in one exec-batch", most=1000)
    call_bytes: int = _limit(8 << 20, "bytes in the arguments of one call")
    batch_output_bytes: int = _limit(256 << 20, "bytes of output that the calls of one exec-batch may have together")
    calls_in_flight: int = _limit(20_000, "calls that run or wait at once")
    lease_calls: int = _limit(100_000, "calls over the life of one lease", most=100_000)
    call_wait_s: int = _limit(3600, "seconds of waiting for one call")
    waiters: int = _limit(10_000, "acquires that wait for one pool")
    lease_ids: int = _limit(10_000, "lease ids in one request")
    page_items: int = _limit(1000, "items in one page of a list")
    list_entries: int = _limit(100_000, "entries in the list of one folder", most=100_000)
    upload_bytes: int = _limit(16 << 30, "bytes in one file, archive or request to a port sent to a slot")
    labels: int = _limit(64, "labels of one lease")
    pools: int = _limit(64, "pools at once, those of the settings file included")
    pool_sandboxes: int = _limit(1000, "sandboxes that one pool may have (max_sandboxes)")
    pool_slots: int = _limit(100_000, "slots that one pool may have (max_sandboxes x slots_per_sandbox)")
    pool_env_vars: int = _limit(256, "env_vars of one pool")
    streams: int = _limit(1000, "event streams open at once")
    port_connections: int = _limit(512, "connections to ports of slots open at once")
    terminals: int = _limit(500, "connections to terminals open at once")
    run_batches: int = _limit(32, "run-batches at once")
    run_batch_items: int = _limit(10_000, "items in one run-batch")
    run_batch_bytes: int = _limit(256 << 20, "bytes in one run-batch that is sent as NDJSON")
    run_batch_item_bytes: int = _limit(16 << 20, "bytes in one item of a run-batch")
    run_batch_item_artifact_bytes: int = _limit(8 << 20, "bytes of artifacts of one item of a run-batch")
    run_batch_artifact_bytes: int = _limit(256 << 20, "bytes of artifacts of one run-batch")
    run_batch_kept_bytes: int = _limit(1 << 30, "bytes of results that are kept for run-batches with a request_key")
    answer_memory_bytes: int = _limit(256 << 20, "bytes of memory for responses that are not sent yet")
    answer_file_bytes: int = _limit(2 << 30, "bytes of large outputs of responses that are not sent yet")
    answer_wait_s: int = _limit(10, "seconds of waiting for memory or files for a response")
    answer_stall_s: int = _limit(60, "seconds in which a client reads nothing of its response, or a program nothing of what is sent to its port")


MAX_OUTPUT_LIMIT_BYTES = 10 << 20
"""The highest `output_limit_bytes` of a call; fixed by the contract."""

LIMITS: Final[Mapping[str, dataclasses.Field[int]]] = {field.name: field for field in dataclasses.fields(Limits)}


def text_of(name: str) -> str:
    """What a limit counts, as errors and documentation say it."""
    text: str = LIMITS[name].metadata["text"]
    return text


def most_of(name: str) -> int | None:
    """The highest value that the contract allows for a limit; None: any."""
    most: int | None = LIMITS[name].metadata["most"]
    return most


def limit_sentence(limits: Limits, name: str) -> str:
    """What every error about a limit says: its value, what it counts, and its name."""
    return f"more than {getattr(limits, name)} {text_of(name)}: that is `limits.{name}`"


def too_many(limits: Limits, name: str, field: str) -> InvalidRequest:
    """The error for a request one of whose fields exceeds a limit."""
    return InvalidRequest(f"{field}: {limit_sentence(limits, name)}", field=field, limit=name)


def too_large(limits: Limits, name: str) -> PayloadTooLarge:
    """The error for a body that exceeds a limit."""
    return PayloadTooLarge(limit_sentence(limits, name), limit=name, limit_bytes=getattr(limits, name))


def too_many_at_once(limits: Limits, name: str) -> PoolServiceError:
    """The error for a request that would exceed a limit of what may exist at one time."""
    return QuotaExceeded(f"{limit_sentence(limits, name)}; try again later", limit=name, retry_after_s=5)

"""Every size and count that a request may reach, by name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The named limits of the HTTP side; the settings file sets them under `limits`."""

    body_bytes: int = 32 << 20
    """A JSON request body."""
    json_depth: int = 64
    """How deep arrays and objects nest in a JSON body."""
    batch_calls: int = 1000
    """Tool calls in one exec-batch."""
    call_bytes: int = 8 << 20
    """The arguments of one tool call, as JSON."""
    batch_output_bytes: int = 256 << 20
    """The sum of `output_limit_bytes` over the calls of one exec-batch."""
    calls_in_flight: int = 20_000
    """Tool calls that the service has taken and not yet answered, over all requests."""
    waiters: int = 10_000
    """Acquires that queue for one pool."""
    lease_ids: int = 10_000
    """Lease ids in one release or renew."""
    page_items: int = 1000
    """Items in one page of a list."""
    list_entries: int = 10_000
    """Entries in one answer of a file list."""
    upload_bytes: int = 16 << 30
    """One file or archive sent to a slot."""
    labels: int = 64
    """Labels of one lease."""
    pools: int = 64
    """Pools at once, those of the settings file included."""


MAX_OUTPUT_LIMIT_BYTES = 10 << 20
"""The most that `output_limit_bytes` may ask for; fixed by the contract."""

DEFAULT_OUTPUT_LIMIT_BYTES = 50_000

"""Follows the service's own events as an admin: who claims what comes free, and which leases the tenant of the small acquires is given meanwhile."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

import httpx

from tests.faults.history import History

RETRY_AFTER_S = 0.1
ENDS = frozenset({"lease.released", "lease.expired", "lease.lost"})
KINDS = {"pool.claimant": "claimant", "lease.acquired": "acquired", "missed": "missed", **dict.fromkeys(ENDS, "lease ended")}


async def follow_events(url: str, headers: Mapping[str, str], history: History) -> None:
    """Note what is seen, in the order of the service, until this is cancelled; where the stream was cut, that.

    Args:
        url: the service itself, not the proxy before it.
        headers: of an admin; of leases it sees only its own tenant's.
        history: takes `seen` events.
    """
    timeout = httpx.Timeout(10.0, read=None)
    async with httpx.AsyncClient(base_url=url, headers=dict(headers), timeout=timeout, trust_env=False) as http:
        while True:
            kind, is_seen = "", False
            try:
                async with http.stream("GET", "/v1/events") as stream:
                    is_seen = True
                    async for line in stream.aiter_lines():
                        name, _, value = line.partition(":")
                        if name == "event":
                            kind = value.strip()
                        elif name == "data" and kind in KINDS:
                            data = json.loads(value)
                            history.note("seen", what=KINDS[kind], lease_id=data.get("lease_id"), claimant=data.get("claimant"))
            except httpx.TransportError:
                pass  # the service is down: what it did meanwhile is not seen, and the checker is told so
            if is_seen:
                history.note("seen", what="missed", lease_id=None, claimant=None)
            await asyncio.sleep(RETRY_AFTER_S)

"""Follows the event stream of the service as an admin, to see the claims of gangs and the leases that are granted to the other tenant meanwhile."""

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
    """Record the events in the order of the service until this is cancelled, and record where the stream was interrupted.

    Args:
        url: the address of the service itself, not of the proxy.
        headers: the headers of an admin, who sees the leases of its own tenant only.
        history: the events are recorded there, with the kind `seen`.
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
                pass  # the service is down: the event `missed` below says that its events meanwhile are not known
            if is_seen:
                history.note("seen", what="missed", lease_id=None, claimant=None)
            await asyncio.sleep(RETRY_AFTER_S)

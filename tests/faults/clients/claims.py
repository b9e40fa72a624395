"""The claims of gangs in the event stream: while a pool reserves free slots for a gang, no other tenant is granted a slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.faults.history import Event


@dataclass(kw_only=True, slots=True)
class Claim:
    """One claim of a gang.

    Args:
        claimant: the claimant as in the event: tenant, run_id, count, held_slots, waited_s.
        began_at: when the event came.
        granted: the leases that were granted to the other tenant during the claim.
        ended: how many leases of the other tenant ended during the claim.
    """

    claimant: dict[str, object]
    began_at: float
    granted: list[str] = field(default_factory=list)
    ended: int = 0


def claims_seen(events: Sequence[Event], tenant: str = "gangs") -> list[Claim]:
    """Return every claim of a tenant whose beginning was seen, up to its end or up to an interruption of the stream.

    Args:
        events: the history. Its `seen` events are those of the other tenant's stream, in the order of the service.
        tenant: the tenant whose claims are returned.
    """
    claims: list[Claim] = []
    claim: Claim | None = None
    for event in events:
        if event.kind != "seen":
            continue
        if event["what"] in ("claimant", "missed"):
            claimant = event["claimant"]
            claim = Claim(claimant=claimant, began_at=event.at) if claimant is not None and claimant["tenant"] == tenant else None
            if claim is not None:
                claims.append(claim)
        elif claim is not None and event["what"] == "acquired":
            claim.granted.append(event["lease_id"])
        elif claim is not None:
            claim.ended += 1
    return claims

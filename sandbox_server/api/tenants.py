"""Who a token belongs to."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from sandbox_server.core.errors import Unauthorized


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """A holder of leases.

    Args:
        name: what its leases, runs and log lines carry.
        token: proves that a request is its own; None only where authentication is off.
        admin: may do what `api.md` keeps for admins.
        max_leases: at most so many leases at once, slots that its own pools reserve included; None: no limit of its own.
        max_slots: at most so many slots in its own pools together, at their largest; None: no limit of its own.
        backends: those on which it may make pools; an admin may on every one.
        max_waiters: at most so many acquires that queue, over all pools; None: no limit of its own.
        max_running_calls: at most so many tool calls running at once, the others wait for their turn; None: no limit of its own.
        weight: its share of contended slots, beside the other tenants'.
    """

    name: str
    token: str | None = field(default=None, repr=False)
    admin: bool = False
    max_leases: int | None = None
    max_slots: int | None = None
    backends: tuple[str, ...] = ("local",)
    max_waiters: int | None = None
    max_running_calls: int | None = None
    weight: float = 1.0


FORMER = Tenant(name="")
HOW = "send `Authorization: Bearer TOKEN`"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Tenants:
    """The tenants that are let in.

    Args:
        tenants: all of them; with `open_door`, the one that everybody is.
        open_door: no token is asked for (`SANDBOX_AUTH=none`).
    """

    def __init__(self, tenants: Iterable[Tenant], *, open_door: bool = False) -> None:
        self._open_door = open_door
        self.replace(tenants)

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """Take these instead of the ones known so far."""
        self._all = tuple(tenants)
        self._by_name = {tenant.name: tenant for tenant in self._all}
        self._by_digest = tuple((_digest(tenant.token.encode()), tenant) for tenant in self._all if tenant.token is not None)

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Every tenant."""
        return self._all

    def weight(self, name: str) -> float:
        """A tenant's share of contended slots."""
        return self._of(name).weight

    def max_leases(self, name: str) -> int | None:
        """How many leases a tenant may hold at once; None: no limit of its own."""
        return self._of(name).max_leases

    def max_slots(self, name: str) -> int | None:
        """How many slots a tenant's pools may have at most, together; None: no limit of its own."""
        return self._of(name).max_slots

    def knows(self, name: str) -> bool:
        """Whether there is a tenant of this name."""
        return name in self._by_name

    def max_waiters(self, name: str) -> int | None:
        """How many acquires of a tenant may queue at once; None: no limit of its own."""
        return self._of(name).max_waiters

    def max_running_calls(self, name: str) -> int | None:
        """How many calls of a tenant may run at once; None: no limit of its own."""
        return self._of(name).max_running_calls

    def _of(self, name: str) -> Tenant:
        """The tenant of this name; one without limits for a name that no token has any more, though leases still do."""
        return self._by_name.get(name, FORMER)

    def authenticate(self, authorization: bytes | None) -> Tenant:
        """The tenant of an `Authorization` header.

        Raises:
            Unauthorized: there is no header, it is no bearer token, or nobody has that token.
        """
        if self._open_door:
            return self._all[0]
        if authorization is None:
            raise Unauthorized(f"the request carries no token: {HOW}")
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise Unauthorized(f"the Authorization header carries no token: {HOW}")
        return self.of_token(token.strip())

    def of_token(self, token: bytes) -> Tenant:
        """The tenant of a token, compared in constant time: digests of one length, and no early way out of the loop.

        Raises:
            Unauthorized: nobody has that token.
        """
        digest = _digest(token)
        found: Tenant | None = None
        for known, tenant in self._by_digest:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("this token is not known here")
        return found

"""The tenants of the service, their limits, and the authentication of a request by its token."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass, field

from sandbox_server.core.errors import Unauthorized


@dataclass(frozen=True, kw_only=True, slots=True)
class Tenant:
    """One user of the service, who owns leases and pools and is known by a token.

    Args:
        name: the name that its leases, runs and log lines carry.
        token: the token that its requests carry; None only where authentication is disabled.
        admin: whether it may do what only admins may do.
        max_leases: how many leases it may hold at once, the slots included that its own pools reserve; None: no limit of its own.
        max_slots: how many slots its own pools may have together, each at its largest; None: no limit of its own.
        backends: the backends on which it may make pools; an admin may use every backend.
        max_waiters: how many of its acquires may queue at once, over all pools; None: no limit of its own.
        max_running_calls: how many of its tool calls may run at once, while further ones wait; None: no limit of its own.
        weight: its share of contended slots, relative to the weights of the other tenants.
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


UNKNOWN_TENANT = Tenant(name="")
"""A tenant that is not configured any more, though it still has leases: it has no limits of its own."""
HOW_TO_AUTHENTICATE = "send `Authorization: Bearer TOKEN`"


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


class Tenants:
    """The configured tenants.

    Args:
        tenants: all of them; with `authentication_disabled`, the one tenant of every request.
        authentication_disabled: whether requests need no token (`SANDBOX_AUTH=none`).
    """

    def __init__(self, tenants: Iterable[Tenant], *, authentication_disabled: bool = False) -> None:
        self._authentication_disabled = authentication_disabled
        self.replace(tenants)

    def replace(self, tenants: Iterable[Tenant]) -> None:
        """Replace all tenants, as after a reload of the settings file."""
        self._all = tuple(tenants)
        self._by_name = {tenant.name: tenant for tenant in self._all}
        self._by_digest = tuple((_digest(tenant.token.encode()), tenant) for tenant in self._all if tenant.token is not None)

    @property
    def all(self) -> tuple[Tenant, ...]:
        """Every tenant."""
        return self._all

    def weight(self, name: str) -> float:
        """A tenant's share of contended slots, relative to the weights of the others."""
        return self._of(name).weight

    def max_leases(self, name: str) -> int | None:
        """How many leases a tenant may hold at once; None: no limit of its own."""
        return self._of(name).max_leases

    def max_slots(self, name: str) -> int | None:
        """How many slots a tenant's own pools may have together; None: no limit of its own."""
        return self._of(name).max_slots

    def has_tenant(self, name: str) -> bool:
        """Whether a tenant of this name is configured."""
        return name in self._by_name

    def max_waiters(self, name: str) -> int | None:
        """How many acquires of a tenant may queue at once, over all pools; None: no limit of its own."""
        return self._of(name).max_waiters

    def max_running_calls(self, name: str) -> int | None:
        """How many calls of a tenant may run at once; None: no limit of its own."""
        return self._of(name).max_running_calls

    def _of(self, name: str) -> Tenant:
        """The tenant of this name; `UNKNOWN_TENANT` for a name that is not configured."""
        return self._by_name.get(name, UNKNOWN_TENANT)

    def authenticate(self, authorization: bytes | None) -> Tenant:
        """The tenant of an `Authorization` header.

        Raises:
            Unauthorized: there is no header, it carries no bearer token, or no tenant has that token.
        """
        if self._authentication_disabled:
            return self._all[0]
        if authorization is None:
            raise Unauthorized(f"the request carries no token: {HOW_TO_AUTHENTICATE}")
        scheme, _, token = authorization.partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            raise Unauthorized(f"the Authorization header carries no token: {HOW_TO_AUTHENTICATE}")
        return self.tenant_of_token(token.strip())

    def tenant_of_token(self, token: bytes) -> Tenant:
        """The tenant of a token.

        The time that this takes does not depend on the token: digests of one length are compared, and all of them, whichever matches.

        Raises:
            Unauthorized: no tenant has that token.
        """
        digest = _digest(token)
        found: Tenant | None = None
        for known, tenant in self._by_digest:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("this token is not known here")
        return found

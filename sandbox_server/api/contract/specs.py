"""Pool specs: makes the value from a checked body, checks what one field alone does not show, and decides who may set which field."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

from sandbox_server.agent.allowed_hosts import find_entry_problem, find_network_problem
from sandbox_server.api.contract.requests import PoolSpecBody
from sandbox_server.api.limits import Limits, limit_sentence
from sandbox_server.core.errors import Forbidden
from sandbox_server.core.types import LocalSpec, ModalSpec, NomadSpec, PoolSpec

POOL_NAME: Final = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
ADMINS_ONLY: Final = (
    "local",
    "nomad.address",
    "nomad.driver",
    "nomad.privileged",
    "nomad.singularity_image",
    "nomad.job_id",
    "modal.secrets",
    "workspace_base",
    "shared",
    "allow_private",
)
"""The fields of a spec that only admins may set: those that name a path, right or network of a machine, and the one that shows a pool to every tenant."""


def spec_of(body: PoolSpecBody) -> PoolSpec:
    """Make the value of a pool spec from a checked body."""
    fields = {name: getattr(body, name) for name in PoolSpecBody.model_fields}
    fields["allow_hosts"] = None if body.allow_hosts is None else tuple(body.allow_hosts)
    fields["allow_private"] = tuple(body.allow_private)
    fields["local"] = LocalSpec(expose=tuple(body.local.expose))
    fields["nomad"] = NomadSpec(**{**body.nomad.model_dump(), "datacenters": tuple(body.nomad.datacenters)})
    fields["modal"] = ModalSpec(**{**body.modal.model_dump(), "secrets": tuple(body.modal.secrets)})
    return PoolSpec(**fields)


def spec_problem(body: PoolSpecBody, limits: Limits) -> str | None:
    """The first error of a pool spec that the model of its body does not check, as `field: sentence`; None: there is none."""
    return _unsupported_value(body) or _contradiction(body) or _exceeded_limit(body, limits)


def _contradiction(body: PoolSpecBody) -> str | None:
    if body.min_sandboxes > body.max_sandboxes:
        return f"min_sandboxes: must not be above max_sandboxes, {body.max_sandboxes}"
    if body.default_timeout_s > body.max_timeout_s:
        return f"default_timeout_s: must not be above max_timeout_s, {body.max_timeout_s:.10g}"
    if body.network != "internet" and (body.allow_hosts is not None or body.allow_private):
        field = "allow_hosts" if body.allow_hosts is not None else "allow_private"
        return f"{field}: needs network: internet; slots that share the network of their sandbox are not filtered"
    if body.network == "internet" and (body.dedicated or body.backend != "local"):
        return "network: internet needs slots in mode bwrap, so a pool on the local backend that is not dedicated"
    if body.dedicated and body.slots_per_sandbox != 1:
        return "slots_per_sandbox: must be 1 in a dedicated pool"
    return None


def _unsupported_value(body: PoolSpecBody) -> str | None:
    if body.root == "overlay":
        return "root: overlay is reserved; allowed is read-only"
    if body.dedicated and body.backend == "local":
        return "dedicated: not possible on the local backend; a dedicated sandbox needs an image of its own"
    if any(not path.startswith("/") or "\0" in path for path in body.local.expose):
        return "local.expose: must be absolute paths"
    if any(not name or "=" in name or "\0" in name + value for name, value in body.env_vars.items()):
        return "env_vars: a name must not be empty or contain `=`, and neither names nor values may contain a NUL"
    problem = hosts_problem("allow_hosts", body.allow_hosts or (), find_entry_problem)
    problem = problem or hosts_problem("allow_private", body.allow_private, find_network_problem)
    if problem is not None:
        return problem
    if not body.workspace_base.startswith("/") or "\0" in body.workspace_base:
        return "workspace_base: must be an absolute path"
    return None


def hosts_problem(field: str, entries: Sequence[str], find_problem: Callable[[object], str | None]) -> str | None:
    """The first error in a list of hosts or networks, as `field: sentence`; None: there is none.

    Args:
        field: the name of the list.
        entries: the list.
        find_problem: says what is wrong with an entry.
    """
    for entry in entries:
        problem = find_problem(entry)
        if problem is not None:
            return f"{field}: {entry[:100]!r} {problem}"
    return None


def _exceeded_limit(body: PoolSpecBody, limits: Limits) -> str | None:
    if body.max_sandboxes > limits.pool_sandboxes:
        return f"max_sandboxes: {limit_sentence(limits, 'pool_sandboxes')}"
    if body.max_sandboxes * body.slots_per_sandbox > limits.pool_slots:
        return f"max_sandboxes: {limit_sentence(limits, 'pool_slots')}"
    if len(body.env_vars) > limits.pool_env_vars:
        return f"env_vars: {limit_sentence(limits, 'pool_env_vars')}"
    return None


def check_may_set(wanted: PoolSpec, now: PoolSpec | None, *, gives_env_vars: bool, backends: Collection[str]) -> None:
    """Refuse a spec that a tenant who is not an admin may not give a pool.

    Args:
        wanted: the new spec.
        now: the spec that the pool has; None for a new pool, which is compared with the defaults.
        gives_env_vars: whether the request itself has the field `env_vars`.
        backends: the backends on which the tenant may make pools. An unchanged spec is not refused because of its backend.

    Raises:
        Forbidden: the spec changes a field that only admins may set, or the tenant may not use its backend; the error names the field.
    """
    if wanted.backend not in backends and wanted != now:
        allowed = ", ".join(backends) or "none"
        raise Forbidden(f"backend: this tenant may make and change pools on {allowed}, not on {wanted.backend}; an admin may allow it", field="backend")
    base = now if now is not None else PoolSpec()
    for path in ADMINS_ONLY:
        if _at(wanted, path) != _at(base, path):
            raise Forbidden(f"{path}: only an admin may set it", field=path)
    # Without isolation, a command on this machine could read the token of the service. So only an admin may allow that.
    if wanted.backend == "local" and wanted.allow_none and not base.allow_none:
        raise Forbidden("allow_none: on the local backend only an admin may set it", field="allow_none")
    if base.env_vars and not gives_env_vars:
        # A spec without `env_vars` means that there are none. Only admins see them, so another tenant would delete them without knowing.
        raise Forbidden("env_vars: this pool has some, which only admins see; name those that it is to have", field="env_vars")


def _at(spec: Any, path: str) -> Any:
    for name in path.split("."):
        spec = getattr(spec, name)
    return spec


def shown_spec(spec: PoolSpec, *, admin: bool) -> dict[str, Any]:
    """The JSON of a spec. Only admins see its `env_vars`."""
    shown = dataclasses.asdict(spec)
    if not admin:
        del shown["env_vars"]
    return shown

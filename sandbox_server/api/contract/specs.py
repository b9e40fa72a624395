"""Pool specs: from what was sent or written to a value, what is wrong between its fields, and who may set which."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Final

from sandbox_server.api.contract.requests import PoolSpecBody
from sandbox_server.api.limits import Limits, sentence
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
)
"""What only admins may set, by its path in the spec: what names a path or a right of a machine, and what every tenant sees."""


def spec_of(body: PoolSpecBody) -> PoolSpec:
    """A pool spec as a value."""
    fields = {name: getattr(body, name) for name in PoolSpecBody.model_fields}
    fields["local"] = LocalSpec(expose=tuple(body.local.expose))
    fields["nomad"] = NomadSpec(**{**body.nomad.model_dump(), "datacenters": tuple(body.nomad.datacenters)})
    fields["modal"] = ModalSpec(**{**body.modal.model_dump(), "secrets": tuple(body.modal.secrets)})
    return PoolSpec(**fields)


def spec_problem(body: PoolSpecBody, limits: Limits) -> str | None:
    """What is wrong with a pool spec beyond its single fields: `field: sentence`, or None."""
    return _not_possible(body) or _between_fields(body) or _beyond_limits(body, limits)


def _between_fields(body: PoolSpecBody) -> str | None:
    if body.min_sandboxes > body.max_sandboxes:
        return f"min_sandboxes: must not be above max_sandboxes, {body.max_sandboxes}"
    if body.default_timeout_s > body.max_timeout_s:
        return f"default_timeout_s: must not be above max_timeout_s, {body.max_timeout_s:.10g}"
    if body.dedicated and body.slots_per_sandbox != 1:
        return "slots_per_sandbox: must be 1 in a dedicated pool"
    return None


def _not_possible(body: PoolSpecBody) -> str | None:
    if body.network == "internet":
        return "network: internet is reserved; allowed are shared, none"
    if body.root == "overlay":
        return "root: overlay is reserved; allowed is read-only"
    if body.dedicated and body.backend == "local":
        return "dedicated: the local backend cannot; a dedicated sandbox needs an image of its own"
    if any(not path.startswith("/") or "\0" in path for path in body.local.expose):
        return "local.expose: must be absolute paths"
    if any(not name or "=" in name or "\0" in name + value for name, value in body.env_vars.items()):
        return "env_vars: names must not be empty or hold `=`, nothing may hold a NUL"
    if not body.workspace_base.startswith("/") or "\0" in body.workspace_base:
        return "workspace_base: must be an absolute path"
    return None


def _beyond_limits(body: PoolSpecBody, limits: Limits) -> str | None:
    if body.max_sandboxes > limits.pool_sandboxes:
        return f"max_sandboxes: {sentence(limits, 'pool_sandboxes')}"
    if body.max_sandboxes * body.slots_per_sandbox > limits.pool_slots:
        return f"max_sandboxes: {sentence(limits, 'pool_slots')}"
    if len(body.env_vars) > limits.pool_env_vars:
        return f"env_vars: {sentence(limits, 'pool_env_vars')}"
    return None


def check_may_set(wanted: PoolSpec, now: PoolSpec | None, *, gives_env_vars: bool, backends: Collection[str]) -> None:
    """Refuse to somebody who is no admin a spec that changes what only admins may set, or changes a pool on a backend that is not for it.

    Args:
        wanted: what the pool is to be.
        now: what it is; None for a new one, which starts from the defaults.
        gives_env_vars: whether the request says `env_vars` itself.
        backends: those on which the tenant may make pools. The same spec again is not refused where one was taken away from it.

    Raises:
        Forbidden: naming the field.
    """
    if wanted.backend not in backends and wanted != now:
        allowed = ", ".join(backends) or "none"
        raise Forbidden(f"backend: this tenant may make and change pools on {allowed}, not on {wanted.backend}; an admin may allow it", field="backend")
    base = now if now is not None else PoolSpec()
    for path in ADMINS_ONLY:
        if _at(wanted, path) != _at(base, path):
            raise Forbidden(f"{path}: only an admin may set it", field=path)
    # Without isolation a command could read the token of the service beside it. So on this machine that is an admin's decision.
    if wanted.backend == "local" and wanted.allow_none and not base.allow_none:
        raise Forbidden("allow_none: on the local backend only an admin may set it", field="allow_none")
    if base.env_vars and not gives_env_vars:
        # Who cannot see them would wipe them without knowing: a spec that leaves them out means that there are none.
        raise Forbidden("env_vars: this pool has some, which only admins see; say which it is to have", field="env_vars")


def _at(spec: Any, path: str) -> Any:
    for name in path.split("."):
        spec = getattr(spec, name)
    return spec


def shown_spec(spec: PoolSpec, *, admin: bool) -> dict[str, Any]:
    """A spec as callers see it; only admins see `env_vars`."""
    shown = dataclasses.asdict(spec)
    if not admin:
        del shown["env_vars"]
    return shown

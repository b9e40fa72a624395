"""The pool that an environment uses: from its settings to a canonical pool spec, and from the spec to the name of the pool. Nothing here does I/O."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: After so long without a lease, an acquire and a `PUT`, the service deletes the pool, in seconds: a dead trainer's pool goes by itself.
DELETE_AFTER_IDLE_S = 900.0
#: The service's own default of `acquire_timeout_s`, in seconds. A pool that several trainers share allows at least as long a wait.
_MIN_ACQUIRE_TIMEOUT_S = 60.0
POOL_MODES = ("default", "nomad", "modal")
#: The values of the older setting `terminal_backend` and the backends of their pools.
_TERMINAL_BACKENDS: Mapping[str, str] = {"local": "default", "docker": "docker", "modal": "modal", "singularity": "nomad"}
_DEFAULT_WORKSPACE_BASE = "/data"


class SettingsError(ValueError):
    """A setting of the environment is wrong, or asks for something that is not built. The message names the setting in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """Which pool an environment uses. The names and defaults are those of the environment's settings.

    `slots_per_container`, `min_containers` and `max_containers` are the sizes of a pool on the local backend, too.
    """

    tool_pool_mode: str = "default"
    terminal_backend: str = "local"
    sandbox_pool: str | None = None
    require_sandbox: bool = False
    require_stateful_sandbox: bool = False
    purge_job_on_start: bool = False
    acquire_timeout_s: float = 30.0
    nomad_address: str = "http://localhost:4646"
    sandbox_job_id: str = "atropos-sandbox"
    sandbox_image: str = "atropos-sandbox:local"
    slots_per_container: int = 10
    min_containers: int = 1
    max_containers: int = 10
    privileged: bool = False
    driver: str = "docker"
    singularity_image: str | None = None
    modal_app_name: str = "atropos-sandbox"
    modal_image: str = "python:3.11"
    modal_gpu: str | None = None
    modal_cpu: float = 1.0
    modal_memory: int = 2048
    modal_slots_per_sandbox: int = 10
    modal_min_sandboxes: int = 1
    modal_max_sandboxes: int = 5
    modal_idle_timeout: float = 120
    modal_max_lifetime: float = 3600
    modal_acquire_timeout: float = 60.0
    modal_execution_timeout: float = 30.0
    modal_secrets: str = ""
    modal_env_vars: str = ""
    modal_workspace_base: str = _DEFAULT_WORKSPACE_BASE


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRequest:
    """The pool that is asked for.

    Args:
        name: the name of the pool.
        spec: the spec with which it is made; None if the pool must exist already.
        acquire_timeout_s: how long an acquire waits for its slots, in seconds.
    """

    name: str
    spec: Mapping[str, Any] | None
    acquire_timeout_s: float


_DEFAULTS = PoolSettings()
#: The settings that have an effect in one mode only. In another mode, they are refused where they differ from their default.
_SETTINGS_OF_NOMAD = ("nomad_address", "sandbox_job_id", "privileged", "driver", "singularity_image", "purge_job_on_start")
_SETTINGS_OF_MODAL = (
    "modal_app_name", "modal_image", "modal_gpu", "modal_cpu", "modal_memory", "modal_slots_per_sandbox", "modal_min_sandboxes", "modal_max_sandboxes",
    "modal_idle_timeout", "modal_max_lifetime", "modal_acquire_timeout", "modal_execution_timeout", "modal_secrets", "modal_env_vars", "modal_workspace_base",
)  # fmt: skip
_SETTINGS_OF_SPEC = ("require_sandbox", "require_stateful_sandbox", "slots_per_container", "min_containers", "max_containers")


def describe_missing_service(pool: str) -> str:
    """Return one sentence for a run that names a pool and no service that has it."""
    return f"sandbox_pool names the pool {pool!r} of a service: set sandbox_url, or SANDBOX_URL, to its address"


def plan_pool(settings: PoolSettings) -> PoolRequest:
    """Return the pool that the settings ask for.

    Args:
        settings: the settings of the environment.

    Raises:
        SettingsError: a setting is wrong, contradicts another one, or has no effect on this kind of pool.
    """
    backend = _choose_backend(settings)
    if settings.sandbox_pool is not None:
        _refuse_unused(settings, (*_SETTINGS_OF_SPEC, "sandbox_image", *_SETTINGS_OF_NOMAD, *_SETTINGS_OF_MODAL), f"the pool {settings.sandbox_pool!r}")
        return PoolRequest(name=settings.sandbox_pool, spec=None, acquire_timeout_s=settings.acquire_timeout_s)
    spec = _SPECS[backend](settings)
    acquire_timeout_s = settings.modal_acquire_timeout if backend == "modal" else settings.acquire_timeout_s
    return PoolRequest(name=name_pool(spec), spec=spec, acquire_timeout_s=float(acquire_timeout_s))


def name_pool(spec: Mapping[str, Any]) -> str:
    """Return the name of the pool with this spec: what it is, for people, and a hash of the whole spec.

    Trainers of one tenant that have the same spec share one pool.
    """
    canonical = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    image = re.sub(r"[^a-z0-9]+", "-", str(spec.get("image") or "").lower()).strip("-")[-24:].strip("-")
    parts = ("rollouts", str(spec["backend"]), image, hashlib.sha256(canonical.encode()).hexdigest()[:12])
    return "-".join(part for part in parts if part)


def _choose_backend(settings: PoolSettings) -> str:
    """Return the backend of the pool; `default` is the local one.

    Raises:
        SettingsError: the mode or the older `terminal_backend` is not known, or two settings contradict each other.
    """
    mode, terminal_backend = settings.tool_pool_mode, settings.terminal_backend
    if mode not in POOL_MODES:
        raise SettingsError(f"tool_pool_mode: there is no mode {mode!r}; there are {', '.join(POOL_MODES)}; to use a pool by its name, set sandbox_pool")
    if terminal_backend == "ssh":
        raise SettingsError("terminal_backend: 'ssh' is not supported; use local, docker, modal or singularity, or set tool_pool_mode")
    if terminal_backend not in _TERMINAL_BACKENDS:
        raise SettingsError(f"terminal_backend: there is no {terminal_backend!r}; there are {', '.join(_TERMINAL_BACKENDS)}")
    mapped = _TERMINAL_BACKENDS[terminal_backend]
    if terminal_backend != "local" and mode not in ("default", mapped):
        raise SettingsError(f"terminal_backend {terminal_backend!r} and tool_pool_mode {mode!r} contradict each other; leave terminal_backend out")
    chosen = mode if terminal_backend == "local" else mapped
    if settings.sandbox_pool is not None and chosen != "default":
        raise SettingsError("sandbox_pool names a pool that exists, and excludes tool_pool_mode and terminal_backend: leave them out")
    return chosen


def _local_spec(settings: PoolSettings) -> dict[str, Any]:
    _refuse_unused(settings, ("sandbox_image", *_SETTINGS_OF_NOMAD, *_SETTINGS_OF_MODAL), "a pool of the backend local")
    return {"backend": "local", **_container_counts(settings), **_shared_spec(settings, settings.acquire_timeout_s)}


def _docker_spec(settings: PoolSettings) -> dict[str, Any]:
    _refuse_unused(settings, (*_SETTINGS_OF_NOMAD, *_SETTINGS_OF_MODAL), "a pool of the backend docker")
    return {"backend": "docker", "image": settings.sandbox_image, **_container_counts(settings), **_shared_spec(settings, settings.acquire_timeout_s)}


def _nomad_spec(settings: PoolSettings) -> dict[str, Any]:
    _refuse_unused(settings, _SETTINGS_OF_MODAL, "a pool of the backend nomad")
    driver = "singularity" if settings.terminal_backend == "singularity" else settings.driver
    if driver not in ("docker", "singularity"):
        raise SettingsError(f"driver: there is no {driver!r}; there are docker and singularity")
    if (driver == "singularity") != (settings.singularity_image is not None):
        raise SettingsError("singularity_image: the path of a .sif file is needed with the driver singularity, and only with it")
    # Fields that only admins may set are sent only where they differ from their default.
    section = _differing(
        settings,
        {
            "address": "nomad_address",
            "job_id": "sandbox_job_id",
            "singularity_image": "singularity_image",
            "privileged": "privileged",
            "purge_job_on_start": "purge_job_on_start",
        },
    ) | ({"driver": driver} if driver != _DEFAULTS.driver else {})
    image = {} if driver == "singularity" else {"image": settings.sandbox_image}
    shared = _shared_spec(settings, settings.acquire_timeout_s)
    return {"backend": "nomad", **image, **_container_counts(settings), **shared, **({"nomad": section} if section else {})}


def _modal_spec(settings: PoolSettings) -> dict[str, Any]:
    _refuse_unused(settings, (*_SETTINGS_OF_SPEC[2:], "sandbox_image", *_SETTINGS_OF_NOMAD), "a pool of the backend modal")
    section: dict[str, Any] = _differing(settings, {"app_name": "modal_app_name", "gpu": "modal_gpu"})
    secrets = sorted({name.strip() for name in settings.modal_secrets.split(",") if name.strip()})
    spec = {
        "backend": "modal",
        "image": settings.modal_image,
        "cpu": float(settings.modal_cpu),
        "memory_mb": int(settings.modal_memory),
        "slots_per_sandbox": settings.modal_slots_per_sandbox,
        "min_sandboxes": settings.modal_min_sandboxes,
        "max_sandboxes": settings.modal_max_sandboxes,
        "idle_timeout_s": float(settings.modal_idle_timeout),
        "max_lifetime_s": float(settings.modal_max_lifetime),
        "default_timeout_s": float(settings.modal_execution_timeout),
        **_shared_spec(settings, settings.modal_acquire_timeout),
        **({"env_vars": parse_env_vars(settings.modal_env_vars)} if settings.modal_env_vars.strip() else {}),
        **_differing(settings, {"workspace_base": "modal_workspace_base"}),
    }
    section |= {"secrets": secrets} if secrets else {}
    return spec | ({"modal": section} if section else {})


_SPECS = {"default": _local_spec, "docker": _docker_spec, "nomad": _nomad_spec, "modal": _modal_spec}


def parse_env_vars(text: str) -> dict[str, str]:
    """Return the variables of `modal_env_vars`, which has the form `NAME=value;NAME=value`.

    Raises:
        SettingsError: a part has no name or no equals sign.
    """
    variables: dict[str, str] = {}
    for part in text.split(";"):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise SettingsError(f"modal_env_vars: {part.strip()!r} does not have the form NAME=value; several of them are separated by semicolons")
        variables[name.strip()] = value
    return variables


def _container_counts(settings: PoolSettings) -> dict[str, Any]:
    return {"slots_per_sandbox": settings.slots_per_container, "min_sandboxes": settings.min_containers, "max_sandboxes": settings.max_containers}


def _shared_spec(settings: PoolSettings, acquire_timeout_s: float) -> dict[str, Any]:
    """Return the fields that a pool of every backend has."""
    return {
        "require_sandbox": settings.require_sandbox,
        "require_stateful_sandbox": settings.require_stateful_sandbox,
        "acquire_timeout_s": max(_MIN_ACQUIRE_TIMEOUT_S, float(acquire_timeout_s)),
        "delete_after_idle_s": DELETE_AFTER_IDLE_S,
    }


def _differing(settings: PoolSettings, names: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings that differ from their default, under their names in a spec (the keys of `names`)."""
    return {field: getattr(settings, name) for field, name in names.items() if getattr(settings, name) != getattr(_DEFAULTS, name)}


def _refuse_unused(settings: PoolSettings, names: tuple[str, ...], pool: str) -> None:
    """Refuse settings that differ from their default and have no effect on a pool.

    Raises:
        SettingsError: there are some.
    """
    unused = [name for name in names if getattr(settings, name) != getattr(_DEFAULTS, name)]
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        raise SettingsError(f"{', '.join(unused)} {verb} no effect on {pool}: leave {'it' if len(unused) == 1 else 'them'} out")

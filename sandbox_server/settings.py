"""What the operator decides: the environment and one YAML file. Anything unknown, unreadable or out of range stops the start with one line."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox_server.api.limits import Limits
from sandbox_server.api.schemas import PoolSpecBody, first_problem
from sandbox_server.api.tenants import Tenant
from sandbox_server.core.types import LocalSpec, ModalSpec, NomadSpec, PoolSpec

PREFIX = "SANDBOX_"
CLIENTS_OWN = frozenset({"SANDBOX_URL", "SANDBOX_TOKEN"})
LOG_FORMATS = ("json", "text")
LOG_LEVELS = ("debug", "info", "warning", "error")
POOL_NAME = r"^[a-z0-9]([a-z0-9._-]{0,62}[a-z0-9])?$"
LOCAL_TENANT = "local"
NOT_BUILT = ("slot_disk_mb", "delete_after_idle_s")
"""Fields of a pool spec that nothing enforces yet: better refused than ignored."""
MIN_TOKEN_CHARS = 1


class SettingsError(Exception):
    """The service cannot start like this; the message is one line that says where, what, and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything the process was told.

    Args:
        state_dir: the service's own folder.
        config_path: the settings file, if there is one.
        tenants: the configured tenants; none means that the service makes a token of its own.
        open_door: authentication is off.
        advertise_url: where others reach this service, if it was told.
        log_format: `json` or `text`.
        log_level: `debug`, `info`, `warning` or `error`.
        pools: the pools of the file, by name.
        default_pool: the pool of an acquire that names none.
        limits: the named limits.
    """

    state_dir: Path
    config_path: Path | None = None
    tenants: tuple[Tenant, ...] = ()
    open_door: bool = False
    advertise_url: str | None = None
    log_format: str = "json"
    log_level: str = "info"
    pools: Mapping[str, PoolSpec] = field(default_factory=lambda: {"default": PoolSpec()})
    default_pool: str = "default"
    limits: Limits = field(default_factory=Limits)


class FileModel(BaseModel):
    """A part of the settings file."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TenantModel(FileModel):
    """One tenant of the file."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    token: str | None = Field(default=None, min_length=MIN_TOKEN_CHARS)
    token_file: str | None = None
    admin: bool = False
    max_leases: int | None = Field(default=None, ge=0)
    weight: float = Field(default=1.0, gt=0)


class NomadModel(FileModel):
    """How the process reaches Nomad."""

    token_file: str | None = None
    ca_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None


LIMIT_NAMES = tuple(one.name for one in dataclasses.fields(Limits))


class SettingsFile(FileModel):
    """The settings file."""

    pools: dict[Annotated[str, Field(pattern=POOL_NAME)], PoolSpecBody] = Field(default_factory=lambda: {"default": PoolSpecBody()})
    default_pool: str = "default"
    tenants: list[TenantModel] = Field(default_factory=list)
    limits: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    nomad: NomadModel = Field(default_factory=NomadModel)


class EnvironmentModel(BaseModel):
    """The variables that are read, by their names without the prefix."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    CONFIG: str | None = None
    STATE_DIR: str | None = None
    TOKENS: str | None = None
    AUTH: Literal["none", "token"] = "token"
    ADVERTISE_URL: str | None = Field(default=None, pattern=r"^https?://[^/\s]+/?$")
    LOG_FORMAT: Literal["json", "text"] = "json"
    LOG_LEVEL: Literal["debug", "info", "warning", "error"] = "info"


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the environment, and the file that it names.

    Args:
        environ: the environment; default: the process's.

    Raises:
        SettingsError: something is unknown, unreadable or not allowed.
    """
    environ = os.environ if environ is None else environ
    told = _environment(environ)
    path = Path(told.CONFIG) if told.CONFIG else None
    given = read_file(path) if path is not None else SettingsFile()
    limits = _limits(given, path)
    if len(given.pools) > limits.pools:
        raise SettingsError(f"settings file {path}: pools: {len(given.pools)} are more than the {limits.pools} of `limits.pools`")
    if "default_pool" in given.model_fields_set and given.default_pool not in given.pools:
        raise SettingsError(f"settings file {path}: default_pool: there is no pool {given.default_pool!r}; there are {', '.join(given.pools) or 'none'}")
    return Settings(
        state_dir=Path(told.STATE_DIR) if told.STATE_DIR else default_state_dir(environ, os.geteuid()),
        config_path=path,
        tenants=_tenants(told.TOKENS, given, path),
        open_door=told.AUTH == "none",
        advertise_url=told.ADVERTISE_URL.rstrip("/") if told.ADVERTISE_URL else None,
        log_format=told.LOG_FORMAT,
        log_level=told.LOG_LEVEL,
        pools={name: _pool_spec(name, spec, path) for name, spec in given.pools.items()},
        default_pool=given.default_pool,
        limits=limits,
    )


def default_state_dir(environ: Mapping[str, str], uid: int) -> Path:
    """Where a service of this user keeps its state."""
    if uid == 0:
        return Path("/var/lib/sandbox-pool")
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local" / "state")
    return Path(base) / "sandbox-pool"


def _environment(environ: Mapping[str, str]) -> EnvironmentModel:
    allowed = [PREFIX + name for name in EnvironmentModel.model_fields]
    ours = {name: value for name, value in environ.items() if name.startswith(PREFIX) and name not in CLIENTS_OWN}
    for name in ours:
        if name not in allowed:
            raise SettingsError(f"environment: {name}: unknown; allowed are {', '.join(allowed)}")
    try:
        return EnvironmentModel.model_validate({name.removeprefix(PREFIX): value for name, value in ours.items() if value != ""})
    except ValidationError as error:
        raise SettingsError(f"environment: {PREFIX}{first_problem(error, EnvironmentModel.model_fields)[1]}") from None


def read_file(path: Path) -> SettingsFile:
    """Read the settings file.

    Raises:
        SettingsError: it cannot be read, is no YAML, or holds what is not allowed.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"settings file {path}: is no YAML: {' '.join(str(error).split())}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise SettingsError(f"settings file {path}: must be a mapping with {', '.join(SettingsFile.model_fields)}")
    content = {name: ({} if value is None else value) if name in ("pools", "limits", "nomad") else value for name, value in content.items()}
    if isinstance(content.get("pools"), dict):
        content["pools"] = {name: {} if spec is None else spec for name, spec in content["pools"].items()}
    try:
        return SettingsFile.model_validate(content)
    except ValidationError as error:
        raise SettingsError(f"settings file {path}: {_sentence(error)}") from None


def _sentence(error: ValidationError) -> str:
    """What is wrong, and for an unknown key what there is at its place."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = [part for part in first["loc"] if part != "[key]"]
    if first["type"] != "extra_forbidden":
        return first_problem(error, {})[1]
    model: Any = SettingsFile
    for part in location[:-1]:
        model = _below(model, part)
    return f"{'.'.join(map(str, location))}: unknown key; allowed are {', '.join(model.model_fields)}"


def _below(model: Any, part: str | int) -> Any:
    nested = {"pools": PoolSpecBody, "tenants": TenantModel, "nomad": NomadModel}
    if model is SettingsFile:
        return nested[str(part)]
    inner = model.model_fields.get(str(part)) if model is PoolSpecBody else None
    return inner.annotation if inner is not None and inner.annotation is not None and hasattr(inner.annotation, "model_fields") else model


def spec_of(body: PoolSpecBody) -> PoolSpec:
    """A pool spec as a value."""
    fields = {name: getattr(body, name) for name in PoolSpecBody.model_fields}
    fields["local"] = LocalSpec(expose=tuple(body.local.expose))
    fields["nomad"] = NomadSpec(**{**body.nomad.model_dump(), "datacenters": tuple(body.nomad.datacenters)})
    fields["modal"] = ModalSpec(**{**body.modal.model_dump(), "secrets": tuple(body.modal.secrets)})
    return PoolSpec(**fields)


def _limits(given: SettingsFile, path: Path | None) -> Limits:
    for name in given.limits:
        if name not in LIMIT_NAMES:
            raise SettingsError(f"settings file {path}: limits.{name}: unknown key; allowed are {', '.join(LIMIT_NAMES)}")
    return Limits(**given.limits)


def _pool_spec(name: str, body: PoolSpecBody, path: Path | None) -> PoolSpec:
    problem = spec_problem(body)
    if problem is not None:
        raise SettingsError(f"settings file {path}: pools.{name}.{problem}")
    return spec_of(body)


def spec_problem(body: PoolSpecBody) -> str | None:
    """What is wrong between the fields of a pool spec: `field: sentence`, or None."""
    if body.min_sandboxes > body.max_sandboxes:
        return f"min_sandboxes: must not be above max_sandboxes, {body.max_sandboxes}"
    if body.default_timeout_s > body.max_timeout_s:
        return f"default_timeout_s: must not be above max_timeout_s, {body.max_timeout_s:g}"
    if body.network == "internet":
        return "network: internet is reserved; allowed are shared, none"
    if body.root == "overlay":
        return "root: overlay is reserved; allowed is read-only"
    for name in NOT_BUILT:
        if getattr(body, name) is not None:
            return f"{name}: is not built yet; leave it out"
    if body.dedicated and body.backend == "local":
        return "dedicated: the local backend cannot; a dedicated sandbox needs an image of its own"
    if body.dedicated and body.slots_per_sandbox != 1:
        return "slots_per_sandbox: must be 1 in a dedicated pool"
    if any(not path.startswith("/") for path in body.local.expose):
        return "local.expose: must be absolute paths"
    if any(not name or "=" in name or "\0" in name + value for name, value in body.env_vars.items()):
        return "env_vars: names must not be empty or hold `=`, nothing may hold a NUL"
    return None


def _tenants(tokens: str | None, given: SettingsFile, path: Path | None) -> tuple[Tenant, ...]:
    tenants = [*_environment_tenants(tokens), *file_tenants(given, path)]
    for one, kind in (("name", "name"), ("token", "token")):
        seen: set[str] = set()
        for tenant in tenants:
            value = getattr(tenant, one)
            if value in seen:
                raise SettingsError(f"tenants: two tenants with one {kind}" + (f", {value}" if kind == "name" else f" ({tenant.name} is one of them)"))
            seen.add(value)
    return tuple(tenants)


def _environment_tenants(tokens: str | None) -> list[Tenant]:
    tenants = []
    for pair in (tokens or "").split(","):
        if not pair.strip():
            continue
        name, colon, token = pair.strip().partition(":")
        if not colon or not name or not token:
            raise SettingsError("environment: SANDBOX_TOKENS: must be name:token, more of them separated by commas")
        if len(token) < MIN_TOKEN_CHARS:
            raise SettingsError(f"environment: SANDBOX_TOKENS: the token of {name} has fewer than {MIN_TOKEN_CHARS} characters")
        tenants.append(Tenant(name=name, token=token, admin=True))
    return tenants


def file_tenants(given: SettingsFile, path: Path | None) -> list[Tenant]:
    """The tenants of the settings file, their token files read.

    Raises:
        SettingsError: a tenant has no token or two, or its token file cannot be read.
    """
    tenants = []
    for index, one in enumerate(given.tenants):
        where = f"settings file {path}: tenants.{index}"
        if one.max_leases is not None:
            raise SettingsError(f"{where}.max_leases: is not built yet; leave it out")
        if (one.token is None) == (one.token_file is None):
            raise SettingsError(f"{where}: {one.name} needs token or token_file, one of them")
        token = one.token
        if one.token_file is not None:
            try:
                token = Path(one.token_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingsError(f"{where}.token_file: {one.token_file} cannot be read: {getattr(error, 'strerror', None) or error}") from None
            if len(token) < MIN_TOKEN_CHARS:
                raise SettingsError(f"{where}.token_file: {one.token_file} holds fewer than {MIN_TOKEN_CHARS} characters")
        tenants.append(Tenant(name=one.name, token=token, admin=one.admin, weight=one.weight))
    return tenants

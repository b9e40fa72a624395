"""What the operator decides: the environment and one YAML file. Anything unknown, unreadable or out of range stops the start with one line."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox_server.api.contract.requests import PoolSpecBody, first_problem
from sandbox_server.api.contract.specs import POOL_NAME, spec_of, spec_problem
from sandbox_server.api.limits import LIMITS, Limits, most_of
from sandbox_server.api.tenants import Tenant
from sandbox_server.core.types import PoolSpec
from sandbox_server.pool.leasing.claims import CLAIM_AFTER_S

PREFIX = "SANDBOX_"
CLIENTS_OWN = frozenset({"SANDBOX_URL", "SANDBOX_TOKEN"})
LOG_FORMATS = ("json", "text")
LOG_LEVELS = ("debug", "info", "warning", "error")
LOCAL_TENANT = "local"
MIN_TOKEN_CHARS = 1
MAX_CLAIM_AFTER_S = 86_400.0


class SettingsError(Exception):
    """The service cannot start like this; the message is one line that says where, what, and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NomadAccess:
    """How the process reaches Nomad: paths of files that were readable at the start."""

    token_file: Path | None = None
    ca_cert: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DockerAccess:
    """How the process reaches the Docker daemon.

    Attributes:
        host: the daemon's address, such as `unix:///var/run/docker.sock`; None: as the Docker command line finds it.
    """

    host: str | None = None


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
        pools: the pools of the file, by name; where nothing is said of pools, the one that is built in.
        default_pool: the pool of an acquire that names none.
        claim_after_s: how long a tenant's first acquire in the queue waits before its pool holds slots for it, in seconds.
        limits: the named limits.
        nomad: how the process reaches Nomad.
        docker: how the process reaches the Docker daemon.
        local_transport: how the service talks to the agents that the local backend makes from now on, for tests and debugging: `unix`, `tls` or `stdio`.
        sources: where a setting came from, by its dotted name; what is missing is a default.
    """

    state_dir: Path
    config_path: Path | None = None
    tenants: tuple[Tenant, ...] = ()
    open_door: bool = False
    advertise_url: str | None = None
    log_format: str = "json"
    log_level: str = "info"
    pools: Mapping[str, PoolSpec] = field(default_factory=lambda: {"default": PoolSpec(shared=True)})
    default_pool: str = "default"
    claim_after_s: float = CLAIM_AFTER_S
    limits: Limits = field(default_factory=Limits)
    nomad: NomadAccess = field(default_factory=NomadAccess)
    docker: DockerAccess = field(default_factory=DockerAccess)
    local_transport: str = "unix"
    sources: Mapping[str, str] = field(default_factory=dict)

    def source(self, name: str) -> str:
        """Where a setting came from: `default`, `file, PATH` or `environment, NAME`."""
        return self.sources.get(name, "default")

    def of_backend(self, name: str) -> Mapping[str, Any]:
        """The settings that the function which makes a backend gets, by the names of its arguments.

        Args:
            name: the backend.
        """
        settings: dict[str, Mapping[str, Any]] = {"local": {"transport": self.local_transport}, "nomad": asdict(self.nomad), "docker": asdict(self.docker)}
        return settings.get(name, {})

    @property
    def pools_are_built_in(self) -> bool:
        """Whether nothing is said of pools."""
        return "pools" not in self.sources


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
    max_slots: int | None = Field(default=None, ge=0)
    backends: list[Literal["local", "docker", "nomad", "modal"]] = Field(default=["local"])
    max_waiters: int | None = Field(default=None, ge=1)
    max_running_calls: int | None = Field(default=None, ge=1)
    weight: float = Field(default=1.0, gt=0)


class NomadModel(FileModel):
    """How the process reaches Nomad."""

    token_file: str | None = None
    ca_cert: str | None = None
    client_cert: str | None = None
    client_key: str | None = None


class DockerModel(FileModel):
    """How the process reaches the Docker daemon."""

    host: str | None = Field(default=None, pattern=r"^(unix|tcp|ssh)://.+$")


class SettingsFile(FileModel):
    """The settings file."""

    pools: dict[Annotated[str, Field(pattern=POOL_NAME)], PoolSpecBody] = Field(default_factory=lambda: {"default": PoolSpecBody()})
    default_pool: str = "default"
    claim_after_s: float = Field(default=CLAIM_AFTER_S, ge=0, le=MAX_CLAIM_AFTER_S)
    tenants: list[TenantModel] = Field(default_factory=list)
    limits: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)
    nomad: NomadModel = Field(default_factory=NomadModel)
    docker: DockerModel = Field(default_factory=DockerModel)


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
    LOCAL_TRANSPORT: Literal["unix", "tls", "stdio"] = "unix"


SETTING_OF: Mapping[str, str] = {
    "CONFIG": "config_path",
    "STATE_DIR": "state_dir",
    "AUTH": "open_door",
    "ADVERTISE_URL": "advertise_url",
    "LOG_FORMAT": "log_format",
    "LOG_LEVEL": "log_level",
    "LOCAL_TRANSPORT": "local_transport",
}
"""Which setting a variable of the environment makes; `TOKENS` makes some of the tenants."""


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
    if given.default_pool not in given.pools and (given.pools or "default_pool" in given.model_fields_set):
        raise SettingsError(f"settings file {path}: default_pool: there is no pool {given.default_pool!r}; there are {', '.join(given.pools) or 'none'}")
    return Settings(
        state_dir=Path(told.STATE_DIR) if told.STATE_DIR else default_state_dir(environ, os.geteuid()),
        config_path=path,
        tenants=_tenants(told.TOKENS, given, path),
        open_door=told.AUTH == "none",
        advertise_url=told.ADVERTISE_URL.rstrip("/") if told.ADVERTISE_URL else None,
        log_format=told.LOG_FORMAT,
        log_level=told.LOG_LEVEL,
        pools={name: _pool_spec(name, spec, limits, path) for name, spec in given.pools.items()},
        default_pool=given.default_pool,
        claim_after_s=given.claim_after_s,
        limits=limits,
        nomad=_nomad(given, path),
        docker=DockerAccess(host=given.docker.host),
        local_transport=told.LOCAL_TRANSPORT,
        sources=_sources(told, given, path),
    )


def _sources(told: EnvironmentModel, given: SettingsFile, path: Path | None) -> dict[str, str]:
    """Where each setting came from that is not a default, by its dotted name."""
    sources = {SETTING_OF[name]: f"environment, {PREFIX}{name}" for name in told.model_fields_set if name in SETTING_OF}
    if path is not None:
        sources.update((name, f"file, {path}") for name in [*_names_set(given), *given.model_fields_set])
    if told.TOKENS:
        sources["tenants"] = ", and ".join(filter(None, (f"environment, {PREFIX}TOKENS", sources.get("tenants"))))
    return sources


def _names_set(model: BaseModel, prefix: str = "") -> list[str]:
    """The dotted names of what a file says; of a mapping or model that it says in part, of those parts."""
    names = []
    for name in model.model_fields_set:
        value = getattr(model, name)
        children = value.items() if isinstance(value, dict) and name != "env_vars" else ()
        if isinstance(value, BaseModel):
            names += _names_set(value, f"{prefix}{name}.")
        elif children:
            for key, child in children:
                names += _names_set(child, f"{prefix}{name}.{key}.") if isinstance(child, BaseModel) else [f"{prefix}{name}.{key}"]
        else:
            names.append(prefix + name)
    return names


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


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a mapping that has a key twice: the first of them would be ignored without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_file(path: Path) -> SettingsFile:
    """Read the settings file.

    Raises:
        SettingsError: it cannot be read, is no YAML, or holds what is not allowed.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise SettingsError(f"settings file {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        said = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise SettingsError(f"settings file {path}: is no YAML: {said}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise SettingsError(f"settings file {path}: must be a mapping with {', '.join(SettingsFile.model_fields)}")
    content = {name: ({} if value is None else value) if name in ("pools", "limits", "nomad", "docker") else value for name, value in content.items()}
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
    nested = {"pools": PoolSpecBody, "tenants": TenantModel, "nomad": NomadModel, "docker": DockerModel}
    if model is SettingsFile:
        return nested[str(part)]
    inner = model.model_fields.get(str(part)) if model is PoolSpecBody else None
    return inner.annotation if inner is not None and inner.annotation is not None and hasattr(inner.annotation, "model_fields") else model


def _limits(given: SettingsFile, path: Path | None) -> Limits:
    for name, value in given.limits.items():
        if name not in LIMITS:
            raise SettingsError(f"settings file {path}: limits.{name}: unknown key; allowed are {', '.join(LIMITS)}")
        most = most_of(name)
        if most is not None and value > most:
            raise SettingsError(f"settings file {path}: limits.{name}: should be less than or equal to {most}, which the contract fixes")
    return Limits(**given.limits)


def _pool_spec(name: str, body: PoolSpecBody, limits: Limits, path: Path | None) -> PoolSpec:
    problem = spec_problem(body, limits)
    if problem is not None:
        raise SettingsError(f"settings file {path}: pools.{name}.{problem}")
    if "shared" in body.model_fields_set and not body.shared:
        raise SettingsError(f"settings file {path}: pools.{name}.shared: cannot be false: every tenant may use the pools of the settings file")
    return replace(spec_of(body), shared=True)


def _nomad(given: SettingsFile, path: Path | None) -> NomadAccess:
    files = {name: Path(value) for name, value in given.nomad.model_dump().items() if value is not None}
    for name, file in files.items():
        try:
            file.read_bytes()
        except OSError as error:
            raise SettingsError(f"settings file {path}: nomad.{name}: {file} cannot be read: {error.strerror}") from None
    return NomadAccess(**files)


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
        tenants.append(Tenant(**{**one.model_dump(exclude={"token_file"}), "token": token, "backends": tuple(one.backends)}))
    return tenants

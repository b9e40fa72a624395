"""The settings of the service, from environment variables and one YAML file. An unknown, unreadable or invalid setting prevents the start."""

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
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S

PREFIX = "SANDBOX_"
CLIENTS_OWN = frozenset({"SANDBOX_URL", "SANDBOX_TOKEN"})
LOCAL_TENANT = "local"
MIN_TOKEN_CHARS = 1
MAX_CLAIM_AFTER_S = 86_400.0


class SettingsError(Exception):
    """The service cannot start with these settings. The message is one line: where the error is, what it is, and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NomadAccess:
    """The credentials for Nomad: paths of files that could be read at the start."""

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
    """Every setting of the process, checked.

    Args:
        state_dir: the folder in which the service keeps its state.
        config_path: the settings file; None: there is none.
        tenants: the configured tenants; with none, the service makes a token of its own.
        authentication_disabled: whether requests need no token.
        advertise_url: the address under which clients reach the service; None: the service uses the one on which it listens.
        log_format: `json` or `text`.
        log_level: `debug`, `info`, `warning` or `error`.
        pools: the pools of the settings file, by name; if it has no `pools`, the built-in one.
        default_pool: the pool of an acquire that names no pool.
        claim_after_s: how long a tenant's first acquire in the queue waits before its pool holds slots for it, in seconds.
        limits: the limits of requests.
        nomad: how the process reaches Nomad.
        docker: how the process reaches the Docker daemon.
        local_transport: the transport to agents that the local backend starts, for tests and debugging: `unix`, `tls` or `stdio`.
        sources: where each setting comes from, by its dotted name; a setting that is missing here has its default.
    """

    state_dir: Path
    config_path: Path | None = None
    tenants: tuple[Tenant, ...] = ()
    authentication_disabled: bool = False
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
        """Where a setting comes from: `default`, `file, PATH` or `environment, NAME`."""
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
        """Whether the settings name no pools, so that the built-in one is used."""
        return "pools" not in self.sources


class FileModel(BaseModel):
    """The base of the models of the settings file: unknown keys are refused, and no value is converted."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class TenantModel(FileModel):
    """One tenant in the settings file."""

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
    """The credentials for Nomad in the settings file."""

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
    """The environment variables of the service, by their names without the prefix."""

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
    "AUTH": "authentication_disabled",
    "ADVERTISE_URL": "advertise_url",
    "LOG_FORMAT": "log_format",
    "LOG_LEVEL": "log_level",
    "LOCAL_TRANSPORT": "local_transport",
}
"""The setting that each environment variable sets. `TOKENS` is not here: it adds tenants to those of the settings file."""


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the environment variables, and the settings file that they name.

    Args:
        environ: the environment variables; default: those of the process.

    Raises:
        SettingsError: a setting is unknown, cannot be read or is not allowed.
    """
    environ = os.environ if environ is None else environ
    environment = _read_environment(environ)
    path = Path(environment.CONFIG) if environment.CONFIG else None
    file = read_file(path) if path is not None else SettingsFile()
    limits = _limits(file, path)
    if len(file.pools) > limits.pools:
        raise SettingsError(f"settings file {path}: pools: {len(file.pools)} are more than the {limits.pools} of `limits.pools`")
    if file.default_pool not in file.pools and (file.pools or "default_pool" in file.model_fields_set):
        raise SettingsError(f"settings file {path}: default_pool: there is no pool {file.default_pool!r}; there are {', '.join(file.pools) or 'none'}")
    return Settings(
        state_dir=Path(environment.STATE_DIR) if environment.STATE_DIR else default_state_dir(environ, os.geteuid()),
        config_path=path,
        tenants=_tenants(environment.TOKENS, file, path),
        authentication_disabled=environment.AUTH == "none",
        advertise_url=environment.ADVERTISE_URL.rstrip("/") if environment.ADVERTISE_URL else None,
        log_format=environment.LOG_FORMAT,
        log_level=environment.LOG_LEVEL,
        pools={name: _pool_spec(name, spec, limits, path) for name, spec in file.pools.items()},
        default_pool=file.default_pool,
        claim_after_s=file.claim_after_s,
        limits=limits,
        nomad=_nomad(file, path),
        docker=DockerAccess(host=file.docker.host),
        local_transport=environment.LOCAL_TRANSPORT,
        sources=_sources(environment, file, path),
    )


def _sources(environment: EnvironmentModel, file: SettingsFile, path: Path | None) -> dict[str, str]:
    """Where each setting comes from that does not have its default, by its dotted name."""
    sources = {SETTING_OF[name]: f"environment, {PREFIX}{name}" for name in environment.model_fields_set if name in SETTING_OF}
    if path is not None:
        sources.update((name, f"file, {path}") for name in [*_names_set(file), *file.model_fields_set])
    if environment.TOKENS:
        sources["tenants"] = ", and ".join(filter(None, (f"environment, {PREFIX}TOKENS", sources.get("tenants"))))
    return sources


def _names_set(model: BaseModel, prefix: str = "") -> list[str]:
    """The dotted names of the settings that a file sets. For a mapping or a nested model, these are the names inside it."""
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
    """The default state folder of a user."""
    if uid == 0:
        return Path("/var/lib/sandbox-pool")
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME") or "~").expanduser() / ".local" / "state")
    return Path(base) / "sandbox-pool"


def _read_environment(environ: Mapping[str, str]) -> EnvironmentModel:
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
    """Refuses a mapping that has a key twice, of which YAML would silently ignore the first."""

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
        SettingsError: the file cannot be read, is not YAML, or has a setting that is not allowed.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except OSError as error:
        raise SettingsError(f"settings file {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        message = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise SettingsError(f"settings file {path}: is not YAML: {message}") from None
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
    """The first error in a settings file, in one sentence. For an unknown key, it names the keys that are allowed there."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = [part for part in first["loc"] if part != "[key]"]
    if first["type"] != "extra_forbidden":
        return first_problem(error, {})[1]
    model: Any = SettingsFile
    for part in location[:-1]:
        model = _nested_model(model, part)
    return f"{'.'.join(map(str, location))}: unknown key; allowed are {', '.join(model.model_fields)}"


def _nested_model(model: Any, part: str | int) -> Any:
    """The model of what a key of another model, or an entry of its mapping or list, holds."""
    nested = {"pools": PoolSpecBody, "tenants": TenantModel, "nomad": NomadModel, "docker": DockerModel}
    if model is SettingsFile:
        return nested[str(part)]
    inner = model.model_fields.get(str(part)) if model is PoolSpecBody else None
    return inner.annotation if inner is not None and inner.annotation is not None and hasattr(inner.annotation, "model_fields") else model


def _limits(file: SettingsFile, path: Path | None) -> Limits:
    for name, value in file.limits.items():
        if name not in LIMITS:
            raise SettingsError(f"settings file {path}: limits.{name}: unknown key; allowed are {', '.join(LIMITS)}")
        most = most_of(name)
        if most is not None and value > most:
            raise SettingsError(f"settings file {path}: limits.{name}: should be less than or equal to {most}, which is fixed")
    return Limits(**file.limits)


def _pool_spec(name: str, body: PoolSpecBody, limits: Limits, path: Path | None) -> PoolSpec:
    problem = spec_problem(body, limits)
    if problem is not None:
        raise SettingsError(f"settings file {path}: pools.{name}.{problem}")
    if "shared" in body.model_fields_set and not body.shared:
        raise SettingsError(f"settings file {path}: pools.{name}.shared: cannot be false: every tenant may use the pools of the settings file")
    return replace(spec_of(body), shared=True)


def _nomad(file: SettingsFile, path: Path | None) -> NomadAccess:
    files = {name: Path(value) for name, value in file.nomad.model_dump().items() if value is not None}
    for name, file_path in files.items():
        try:
            file_path.read_bytes()
        except OSError as error:
            raise SettingsError(f"settings file {path}: nomad.{name}: {file_path} cannot be read: {error.strerror}") from None
    return NomadAccess(**files)


def _tenants(tokens: str | None, file: SettingsFile, path: Path | None) -> tuple[Tenant, ...]:
    tenants = [*_environment_tenants(tokens), *file_tenants(file, path)]
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


def file_tenants(file: SettingsFile, path: Path | None) -> list[Tenant]:
    """The tenants of the settings file, with the tokens of their token files.

    Raises:
        SettingsError: a tenant has neither `token` nor `token_file`, or both, or its token file cannot be read.
    """
    tenants = []
    for index, one in enumerate(file.tenants):
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

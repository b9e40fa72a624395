"""The settings file: the models of its sections, and how it is read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sandbox_server.api.contract.requests import PoolSpecBody, first_problem
from sandbox_server.api.contract.specs import POOL_NAME
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S
from sandbox_server.settings.values import SettingsError

MAX_CLAIM_AFTER_S = 86_400.0
MIN_TOKEN_CHARS = 1


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

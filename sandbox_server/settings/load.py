"""The settings of the service, from environment variables and one YAML file. An unknown, unreadable or invalid setting prevents the start."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from sandbox_server.api.contract.requests import PoolSpecBody
from sandbox_server.api.contract.specs import spec_of, spec_problem
from sandbox_server.api.limits import LIMITS, Limits, most_of
from sandbox_server.core.types import PoolSpec
from sandbox_server.settings.environment import PREFIX, SETTING_OF, EnvironmentModel, default_state_dir, read_environment
from sandbox_server.settings.file import SettingsFile, read_file
from sandbox_server.settings.tenants import configured_tenants
from sandbox_server.settings.values import DockerAccess, NomadAccess, Settings, SettingsError


def load_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the environment variables, and the settings file that they name.

    Args:
        environ: the environment variables; default: those of the process.

    Raises:
        SettingsError: a setting is unknown, cannot be read or is not allowed.
    """
    environ = os.environ if environ is None else environ
    environment = read_environment(environ)
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
        tenants=configured_tenants(environment.TOKENS, file, path),
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

"""The settings of the service as checked values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandbox_server.api.limits import Limits
from sandbox_server.api.tenants import Tenant
from sandbox_server.core.types import PoolSpec
from sandbox_server.pool.leasing.serving_rules import CLAIM_AFTER_S

LOCAL_TENANT = "local"
"""The name of the tenant of a service without configured tenants."""


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

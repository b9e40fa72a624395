"""The configuration of the agent: one JSON document on standard input, so that neither the command line nor the environment contains the token."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
from typing import Any, Callable, Mapping, Sequence

from sandbox_server.agent.allowed_hosts import MAX_ENTRIES, find_entry_problem, find_network_problem

ISOLATION_MODES = ("bwrap", "uid", "none")
_SLOT_STARTS = ("auto", "executed")


class ConfigError(Exception):
    """The configuration is not valid. The text names the field."""


@dataclasses.dataclass(frozen=True)
class SlotLimits:
    """What one slot may use.

    Args:
        processes: how many processes and threads.
        memory_mb: memory in MiB; None: see `memory_plan`.
        disk_mb: disk in MiB; None: as long as the file system has enough free, see `disk_plan`.
        max_file_mb: the size of one file in MiB.
        cpu: processors; None: no limit.
    """

    processes: int = 512
    memory_mb: int | None = None
    disk_mb: int | None = None
    max_file_mb: int = 1024
    cpu: float | None = None


@dataclasses.dataclass(frozen=True)
class TlsListen:
    """Where the agent listens with TLS.

    Args:
        host: the IP address.
        port: the TCP port. 0: any free one; the agent writes it to its `listening.json`.
        certificate: the certificate that the agent presents, in PEM.
        key: the private key of the certificate, in PEM.
    """

    host: str
    port: int
    certificate: str
    key: str = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Listen:
    """Where the agent listens: the path of its unix socket, and optionally a TCP port."""

    unix: str
    tls: TlsListen | None = None


@dataclasses.dataclass(frozen=True)
class AgentConfig:
    """The whole configuration of the agent.

    Args:
        sandbox_id: the sandbox.
        token: the secret that the service sends in its first frame.
        listen: where the agent listens.
        base_dir: a folder of the agent's own, with mode 0700.
        slots: how many slots the sandbox has.
        isolation: the isolation mode, or `auto`: the best one that works.
        allow_none: whether the mode `none` may be used.
        slot_start: how the inits of slots start: `auto` (forked from a template where that works) or `executed`.
        local: whether the sandbox is a process group of the service's machine. A container is not supported yet.
        network: whether slots can have the network.
        internet: whether each slot with the network has one of its own, with a way to the internet; otherwise it has that of the sandbox.
        allow_hosts: the only hosts that slots of `internet` can reach; None: all that are public.
        allow_private: networks that slots of `internet` can reach although they are not public.
        limits: what one slot may use.
        env_vars: environment variables for all processes of slots.
        expose: folders of the machine that slots can read.
        workspace_base: the folder for the workspaces of the mode `uid`.
        spool_bytes: how much the outputs of one lease may take on disk.
        alone_exit_s: the agent ends after so many seconds without a connection of the service; None: never.
        max_life_s: the agent ends so many seconds after its start; None: never.
        spares: how many slot runtimes are kept prepared for the next resets; None: one if there are several slots.
        cache_bytes: a shared cache that takes more is emptied.
        cache_measure_every_s: how long the agent waits, at least, between two measurements of the shared caches, in seconds.
        memory_mb: how much memory all slots of this agent may use together, in MiB; None: as much as the machine has for slots.
        machine_memory_mb: how much memory the machine has, in MiB; None: as the kernel reports.
        slots_group: the name of the control group over all slots of the machine.
        machine_files: how many open files the machine can have; None: as the kernel reports (`fs.file-max`).
        first_processor: the index of the first processor to pin slots to, among those that the agent may run on; larger ones start again at the first.
        disk_free_mb: how much of a file system must stay free, in MiB; None: see `disk_plan`.
        require_stateful_sandbox: whether the agent proves at its start that a stateful shell and tmux work, and names only those that do.
    """

    sandbox_id: str
    token: str = dataclasses.field(repr=False)
    listen: Listen
    base_dir: str
    slots: int = 10
    isolation: str = "auto"
    allow_none: bool = False
    slot_start: str = "auto"
    local: bool = True
    network: bool = True
    internet: bool = False
    allow_hosts: tuple[str, ...] | None = None
    allow_private: tuple[str, ...] = ()
    limits: SlotLimits = SlotLimits()
    env_vars: Mapping[str, str] = dataclasses.field(default_factory=dict)
    expose: tuple[str, ...] = ()
    workspace_base: str = "/data"
    spool_bytes: int = 256 << 20
    alone_exit_s: float | None = 10.0
    max_life_s: float | None = None
    spares: int | None = None
    cache_bytes: int = 10 << 30
    cache_measure_every_s: float = 10.0
    memory_mb: int | None = None
    machine_memory_mb: int | None = None
    slots_group: str = "sandbox-pool-slots"
    machine_files: int | None = None
    first_processor: int = 0
    disk_free_mb: int | None = None
    require_stateful_sandbox: bool = False

    @property
    def wanted_spares(self) -> int:
        """How many slot runtimes are kept prepared."""
        return self.spares if self.spares is not None else (1 if self.slots > 1 else 0)


_NUMBERS = {
    "slots": (1, 10_000),
    "spool_bytes": (1 << 20, 1 << 50),
    "cache_bytes": (1 << 20, 1 << 50),
    "cache_measure_every_s": (0.01, 1e9),
    "spares": (0, 100),
    "alone_exit_s": (0, 1e9),
    "max_life_s": (0, 1e9),
    "memory_mb": (16, 1 << 40),
    "machine_memory_mb": (16, 1 << 40),
    "machine_files": (1, 1 << 63),
    "first_processor": (0, 1 << 40),
    "disk_free_mb": (1, 1 << 40),
}
_KINDS: dict[str, type] = {
    "sandbox_id": str,
    "token": str,
    "listen": dict,
    "base_dir": str,
    "isolation": str,
    "allow_none": bool,
    "slot_start": str,
    "local": bool,
    "network": bool,
    "internet": bool,
    "allow_hosts": list,
    "allow_private": list,
    "limits": dict,
    "env_vars": dict,
    "expose": list,
    "workspace_base": str,
    "slots_group": str,
    "require_stateful_sandbox": bool,
}
_NULLABLE = ("allow_hosts", "alone_exit_s", "max_life_s", "spares", "memory_mb", "machine_memory_mb", "machine_files", "disk_free_mb")
_GROUP_NAME = re.compile(r"[a-z0-9-]{1,64}\Z")


def _check(name: str, value: Any) -> None:
    if value is None and name in _NULLABLE:
        return
    if name in _NUMBERS:
        low, high = _NUMBERS[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise ConfigError("%s must be a number from %g to %g" % (name, low, high))
    elif not isinstance(value, _KINDS[name]):
        raise ConfigError("%s must be a %s" % (name, _KINDS[name].__name__))


def parse_config(document: bytes) -> AgentConfig:
    """Read the configuration.

    Raises:
        ConfigError: the document is not JSON, or a field is missing, unknown or not valid.
    """
    try:
        raw = json.loads(document)
    except ValueError as error:
        raise ConfigError("the configuration is not JSON: %s" % error) from None
    if not isinstance(raw, dict):
        raise ConfigError("the configuration is not a JSON object")
    known = {field.name for field in dataclasses.fields(AgentConfig)}
    for name in sorted(set(raw) - known):
        raise ConfigError("unknown field %s" % name)
    for name in ("sandbox_id", "token", "listen", "base_dir"):
        if name not in raw:
            raise ConfigError("%s is missing" % name)
    for name, value in raw.items():
        _check(name, value)
    values = dict(raw)
    values["listen"] = _listen(raw["listen"])
    values["limits"] = _limits(raw.get("limits", {}))
    values["expose"] = tuple(raw.get("expose", ()))
    values["allow_hosts"] = _hosts("allow_hosts", raw.get("allow_hosts"), find_entry_problem)
    values["allow_private"] = _hosts("allow_private", raw.get("allow_private"), find_network_problem) or ()
    config = AgentConfig(**values)
    if config.isolation not in (*ISOLATION_MODES, "auto"):
        raise ConfigError("isolation must be auto, %s" % ", ".join(ISOLATION_MODES))
    if config.slot_start not in _SLOT_STARTS:
        raise ConfigError("slot_start must be %s" % " or ".join(_SLOT_STARTS))
    if not config.local:
        raise ConfigError("local must be true: what a slot sees inside a container is not built yet")
    if _GROUP_NAME.match(config.slots_group) is None:
        raise ConfigError("slots_group must be 1 to 64 lower-case letters, digits or -")
    for path in (config.base_dir, config.workspace_base, *config.expose):
        if not str(path).startswith("/"):
            raise ConfigError("%r is not an absolute path" % (path,))
    for name, value in config.env_vars.items():
        if type(value) is not str or "\0" in name + value or "=" in name or not name:
            raise ConfigError("env_vars holds %r, which cannot be an environment variable" % name)
    return config


def _hosts(name: str, raw: Sequence[Any] | None, find_problem: Callable[[object], str | None]) -> tuple[str, ...] | None:
    if raw is None:
        return None
    if len(raw) > MAX_ENTRIES:
        raise ConfigError("%s must have at most %d entries" % (name, MAX_ENTRIES))
    for entry in raw:
        problem = find_problem(entry)
        if problem is not None:
            raise ConfigError("%s: %s %s" % (name, ascii(entry)[:100], problem))
    return tuple(raw)


def _listen(raw: Mapping[str, Any]) -> Listen:
    unix, tls = raw.get("unix"), raw.get("tls")
    if not isinstance(unix, str) or set(raw) - {"unix", "tls"}:
        raise ConfigError('listen must be {"unix": PATH}, with or without "tls"')
    if tls is None:
        return Listen(unix)
    names = [field.name for field in dataclasses.fields(TlsListen)]
    if not isinstance(tls, dict) or set(tls) != set(names):
        raise ConfigError("listen.tls must have %s" % ", ".join(names))
    if not all(isinstance(tls[name], str) for name in ("host", "certificate", "key")):
        raise ConfigError("listen.tls: host, certificate and key must be texts")
    try:
        ipaddress.ip_address(tls["host"])
    except ValueError:
        raise ConfigError("listen.tls.host must be an IP address: the agent asks no name server") from None
    if type(tls["port"]) is not int or not 0 <= tls["port"] < 1 << 16:
        raise ConfigError("listen.tls.port must be a number from 0 to 65535")
    return Listen(unix, TlsListen(**tls))


def _limits(raw: Mapping[str, Any]) -> SlotLimits:
    known = {field.name for field in dataclasses.fields(SlotLimits)}
    for name in sorted(set(raw) - known):
        raise ConfigError("unknown field limits.%s" % name)
    for name, value in raw.items():
        if value is None and name in ("memory_mb", "disk_mb", "cpu"):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
            raise ConfigError("limits.%s must be a number above 0" % name)
    return SlotLimits(**raw)

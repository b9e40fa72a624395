"""The configuration that every backend gives to its agents, built from a pool's spec in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sandbox_server.core.types import Handle, PoolSpec

#: How long an agent runs on without a service before it ends itself, where the service keeps no state to adopt it by, in seconds.
ALONE_EXIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEnvironment:
    """Where an agent will run, as its backend has prepared it.

    Attributes:
        listen: where the agent listens: `unix` a path, and `tls` the host, the port, the certificate and its key, as the agent's configuration has them.
        base_dir: the folder of the agent's own files.
        shares_machine: whether the agent runs on the service's own machine, so that slots must not see its home folders, `/var` and `/run`.
        expose: absolute paths of the machine that slots see read-only.
        outlives_service: whether the agent waits for another service to adopt it after its own has ended.
        first_processor: the index of the first processor to pin slots to. Sandboxes of one machine have different ones.
    """

    listen: Mapping[str, Any]
    base_dir: str
    shares_machine: bool = False
    expose: tuple[str, ...] = field(default=())
    outlives_service: bool = True
    first_processor: int = 0


def agent_config(handle: Handle, spec: PoolSpec, environment: AgentEnvironment) -> dict[str, Any]:
    """Build the configuration of one agent, as JSON values.

    Args:
        handle: the sandbox's last checkpoint, with its id and its token.
        spec: the spec of its pool.
        environment: the place where the agent will run.
    """
    longest_life_s = spec.max_lifetime_s + spec.max_lease_s
    return {
        "sandbox_id": handle.sandbox_id,
        "token": handle.token,
        "listen": dict(environment.listen),
        "base_dir": environment.base_dir,
        "slots": spec.slots_per_sandbox,
        "isolation": "auto",
        "allow_none": spec.allow_none and not spec.require_sandbox,
        "local": environment.shares_machine,
        "network": spec.slots_have_network,
        "require_stateful_sandbox": spec.require_stateful_sandbox,
        "internet": spec.slots_have_network and spec.network == "internet",
        "allow_hosts": None if spec.allow_hosts is None else list(spec.allow_hosts),
        "allow_private": list(spec.allow_private),
        "limits": {
            "processes": spec.slot_processes,
            "memory_mb": spec.slot_memory_mb,
            "disk_mb": spec.slot_disk_mb,
            "max_file_mb": spec.max_file_mb,
            "cpu": spec.cpu,
        },
        "first_processor": environment.first_processor,
        "memory_mb": spec.memory_mb,
        "env_vars": dict(spec.env_vars),
        "expose": list(environment.expose),
        "workspace_base": spec.workspace_base,
        "alone_exit_s": longest_life_s if environment.outlives_service else ALONE_EXIT_S,
        "max_life_s": longest_life_s,
    }

"""The service with some parts other than in production, as a program and as an application for uvicorn.

- `python -m tests.support.service_main`, with the arguments of `python -m sandbox_server`
- `uvicorn --factory tests.support.service_main:make_application`

The environment variable `TEST_SERVICE_PARTS` says which parts differ: see `ServiceParts.environ`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sandbox_server.__main__ import main
from sandbox_server.app import REQUESTS_GRACE_S, Application, Parts
from sandbox_server.backends.base import Backend
from sandbox_server.backends.registry import load_backend
from sandbox_server.connection_limiter import HEAD_WITHIN_S
from sandbox_server.dispatch.runner.decisions import CallTimings
from sandbox_server.link import connect
from sandbox_server.link.agent_link import PING_INTERVAL_S, RESPONSE_TIMEOUT_S
from tests.support.scripted_agent import ScriptedBackend

VARIABLE = "TEST_SERVICE_PARTS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceParts:
    """The parts of a service that differ from those in production.

    Args:
        scripted_agents: whether its sandboxes have scripted agents, which run no commands.
        head_within_s, requests_grace_s, response_timeout_s: see `Parts`.
        ping_after_s, ping_within_s: see `CallTimings`.
        ping_interval_s: how often agents are pinged, in seconds. A link is lost after a silence of four times as long.
        lost_after_s: after how many seconds without a link a sandbox is lost; None: as its backend says.
    """

    scripted_agents: bool = False
    head_within_s: float = HEAD_WITHIN_S
    requests_grace_s: float = REQUESTS_GRACE_S
    response_timeout_s: float = RESPONSE_TIMEOUT_S
    ping_after_s: float = CallTimings().ping_after_s
    ping_within_s: float = CallTimings().ping_within_s
    ping_interval_s: float = PING_INTERVAL_S
    lost_after_s: float | None = None

    @classmethod
    def from_environ(cls) -> ServiceParts:
        """Return the parts that the environment of this process names."""
        return cls(**json.loads(os.environ.get(VARIABLE, "{}")))

    def environ(self) -> dict[str, str]:
        """Return the environment variable with which the programs of this module use these parts."""
        return {VARIABLE: json.dumps(dataclasses.asdict(self))}

    def make_parts(self) -> Parts:
        """Make the parts to build the service from."""
        parts = Parts(
            backend=self._load_backend,
            connect=partial(connect, ping_interval_s=self.ping_interval_s),
            response_timeout_s=self.response_timeout_s,
            call_timings=CallTimings(ping_after_s=self.ping_after_s, ping_within_s=self.ping_within_s),
            head_within_s=self.head_within_s,
            requests_grace_s=self.requests_grace_s,
        )
        return _with_scripted_agents(parts) if self.scripted_agents else parts

    def _load_backend(self, name: str, state_dir: Path, owner: str, survives: bool, settings: Mapping[str, Any]) -> Backend:
        backend = load_backend(name, state_dir, owner, survives, settings)
        if self.lost_after_s is not None:
            backend.traits = dataclasses.replace(backend.traits, lost_after_s=self.lost_after_s)
        return backend


def _with_scripted_agents(parts: Parts) -> Parts:
    backend = ScriptedBackend()

    def load_scripted_backend(name: str, state_dir: Path, owner: str, survives: bool, settings: Mapping[str, Any]) -> ScriptedBackend:
        backend.owner = owner
        return backend

    return dataclasses.replace(parts, backend=load_scripted_backend, connect=backend.connect)


def make_application() -> Application:
    """Make the application, for `uvicorn --factory`."""
    return Application(parts=ServiceParts.from_environ().make_parts())


if __name__ == "__main__":
    sys.exit(main(parts=ServiceParts.from_environ().make_parts()))

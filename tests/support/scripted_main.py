"""The service with scripted agents as an application for uvicorn, for tests of signals and sockets: `uvicorn tests.support.scripted_main:app`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox_server.app import REQUESTS_GRACE_S, Application, Parts
from sandbox_server.connection_limiter import HEAD_WITHIN_S
from sandbox_server.link import AgentLink, Endpoint
from tests.support.scripted_agent import ScriptedBackend

BACKEND = ScriptedBackend()


def _load(name: str, state_dir: Path, owner: str, survives: bool, settings: Mapping[str, Any]) -> ScriptedBackend:
    BACKEND.owner = owner
    return BACKEND


async def _connect(endpoint: Endpoint, timeout_s: float = 10.0) -> AgentLink:
    return await BACKEND.connect(endpoint, timeout_s)


app = Application(
    parts=Parts(
        backend=_load,
        connect=_connect,
        head_within_s=float(os.environ.get("HEAD_WITHIN_S", HEAD_WITHIN_S)),
        requests_grace_s=float(os.environ.get("REQUESTS_GRACE_S", REQUESTS_GRACE_S)),
    )
)

"""The service on scripted agents, for `uvicorn tests.support.scripted_main:app`: what a process of its own does with signals and sockets."""

from __future__ import annotations

import os
from pathlib import Path

from sandbox_server.app import Application, Parts
from sandbox_server.doors import HEAD_WITHIN_S
from sandbox_server.link import AgentLink
from tests.support.scripted_agent import ScriptedBackend

BACKEND = ScriptedBackend()


def _load(name: str, state_dir: Path, owner: str, survives: bool) -> ScriptedBackend:
    BACKEND.owner = owner
    return BACKEND


async def _connect(address: str, token: str, timeout_s: float = 10.0) -> AgentLink:
    return await BACKEND.connect(address, token, timeout_s)


app = Application(parts=Parts(backend=_load, connect=_connect, head_within_s=float(os.environ.get("HEAD_WITHIN_S", HEAD_WITHIN_S))))

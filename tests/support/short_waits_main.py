"""The service with short waits for agents that do not respond: `python -m tests.support.short_waits_main`, with the arguments of `python -m sandbox_server`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from sandbox_server.__main__ import main
from sandbox_server.app import Parts
from sandbox_server.backends.base import Backend
from sandbox_server.backends.registry import load_backend
from sandbox_server.dispatch.runner.decisions import CallTimings
from sandbox_server.link import connect

TIMINGS = CallTimings(ping_after_s=0.4, ping_within_s=0.4)
RESPONSE_TIMEOUT_S = 1.0
PING_INTERVAL_S = 1.25
"""So a link is lost after a silence of 5 s. Tests that need the link of a stopped agent to stand take less."""
LOST_AFTER_S = 0.5


def _load(name: str, state_dir: Path, owner: str, survives: bool, settings: Mapping[str, Any]) -> Backend:
    backend = load_backend(name, state_dir, owner, survives, settings)
    backend.traits = replace(backend.traits, lost_after_s=LOST_AFTER_S)
    return backend


if __name__ == "__main__":
    parts = Parts(backend=_load, connect=partial(connect, ping_interval_s=PING_INTERVAL_S), response_timeout_s=RESPONSE_TIMEOUT_S, call_timings=TIMINGS)
    sys.exit(main(parts=parts))

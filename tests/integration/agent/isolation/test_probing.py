"""A mode that an agent has proven to work is not probed again by the next agent of the machine, unless something has changed that may decide about it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.integration.agent.agent_harness import agent_process, connected
from tests.support.users import ME


async def _probes_uid(parent: Path, **limits: Any) -> bool:
    """Start an agent that uses the mode `bwrap`. Returns whether it has tried the mode `uid`, which creates and removes a folder in `parent`."""
    parent.mkdir(parents=True)
    parent.chmod(0o711)
    os.utime(parent, (0, 0))
    with agent_process(ME, "bwrap", slots=1, spares=0, workspace_base=str(parent / "workspaces"), limits=limits) as agent:
        async with connected(agent) as harness:
            assert harness.link.hello["capabilities"]["modes"]["uid"] == "ok"
    return parent.stat().st_mtime != 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only agents of root can use the mode uid and keep what they have found")
async def test_a_second_agent_does_not_probe_what_the_first_one_has_proven() -> None:
    top = Path("/var/tmp") if os.path.ismount("/var/tmp") else Path("/srv")
    folder = top / f"probing-{secrets.token_hex(4)}"
    unused_limit = 10_000 + secrets.randbelow(1 << 20)
    folder.mkdir(mode=0o711)
    try:
        assert await _probes_uid(folder / "first", processes=unused_limit)
        assert not await _probes_uid(folder / "second", processes=unused_limit)
        assert await _probes_uid(folder / "changed", processes=unused_limit + 1)
    finally:
        for parent in folder.iterdir():
            parent.rmdir()
        folder.rmdir()

"""The proof of the mode `none` that nothing of a slot is left."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.isolation.base import IsolationContext
from sandbox_server.agent.isolation.none import NoIsolation
from sandbox_server.agent.kernel.cgroups import Cgroups


class _Link:
    """A control socket at whose end something happens to init."""

    def __init__(self, at_close: Any) -> None:
        self.close_link = at_close


def _runtime(process: subprocess.Popen[bytes], at_close: Any) -> SlotRuntime:
    groups = SimpleNamespace(leaves=None, remove_groups=lambda: None)
    runtime = SimpleNamespace(process=process, link=_Link(at_close), groups=groups, init_pid=process.pid, init_pidfd=-1, stderr_fd=-1)
    return cast(SlotRuntime, runtime)


@pytest.mark.parametrize(("orderly", "clean"), [(True, True), (False, False)])
async def test_only_an_init_that_exits_by_itself_proves_that_its_processes_have_ended(orderly: bool, clean: bool) -> None:
    """The kernel closes the socket of a killed init some time before the agent can wait for it, so how it ended counts, and not when."""
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    mode = NoIsolation(cast(IsolationContext, SimpleNamespace(slots_dir="")), cast(Cgroups, None))
    proof = await mode.end_runtime(_runtime(process, process.stdin.close if orderly else process.kill))
    process.stdin.close()

    assert (proof["init_ended"], proof["clean"]) == (True, clean)
    assert ("cannot be found" in proof.get("detail", "")) is not clean

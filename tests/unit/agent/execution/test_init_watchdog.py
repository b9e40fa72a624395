"""Whether an init that cannot do what it is asked for proves anything against its slot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sandbox_server.agent.execution.processes.init_watchdog import Unanswered, ask_init
from sandbox_server.agent.execution.slot_runtime import SlotRuntime
from sandbox_server.agent.kernel.memory_plan import MIB, MemoryUsage


def make_runtime(answer: int, usage: MemoryUsage | None) -> SlotRuntime:
    """A slot whose init answers at once, while all memory for slots is in use if `usage` is given."""

    def ask(request: dict[str, Any], fds: object) -> asyncio.Future[int]:
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        future.set_result(answer)
        return future

    return cast(SlotRuntime, SimpleNamespace(link=SimpleNamespace(ask=ask), groups=SimpleNamespace(find_usage_while_full=lambda: usage)))


@pytest.mark.parametrize(("usage", "own_work"), [(None, True), (MemoryUsage(10 * MIB, 100 * MIB), False), (MemoryUsage(200 * MIB, 100 * MIB), False)])
async def test_a_slot_is_to_blame_for_its_init_only_while_the_kernel_has_memory_for_it(usage: MemoryUsage | None, own_work: bool) -> None:
    with pytest.raises(Unanswered) as refused:
        await ask_init(make_runtime(-1, usage), {"op": "signal", "id": 1, "signal": 9})

    assert refused.value.own_work is own_work


async def test_an_init_that_answers_is_believed() -> None:
    assert await ask_init(make_runtime(3, None), {"op": "signal", "id": 1, "signal": 0}) == 3
